"""Search for objects that an object can use.

The search follows attributes, elements, closures, defaults, and globals that the object's code names. Of the user's own
classes, the search also follows the attributes of the class and the code of all methods. Code in site-packages and in
the standard library is not the user's own.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import logging
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from flatout.core.step_hooks import is_hook_table, users_hooks

_DEPTH = 8  # levels of attributes and elements, where all submodules of a module are one level
_NODES = 20_000  # objects in all, nearest first: a dataset's annotations may be millions of objects
_WIDTH = 1024  # elements per container: lists of layers are short, lists of file names are long

_NO_NODES = (str, bytes, int, float, complex, types.ModuleType, np.generic, torch.dtype, torch.device)
_NOT_LOOKED_INTO = (np.ndarray, types.CodeType, logging.Logger, logging.Handler)
_MACHINERY = (
    *("torch._dynamo", "torch._inductor", "torch._functorch", "torch.distributed"),
    *("flatout.distributed", "flatout.autotune", "flatout.core.held"),
)
"""Modules whose objects are left out, because they compile code, connect ranks, or record calls for flatout."""
_LOOPS = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "transformers.trainer", "accelerate.")
"""Packages that run the loop around the steps, with its loggers, files and iterators."""
_OF_MODULE = frozenset(("_parameters", "_buffers", "_modules"))
_METHODS = ("__getitem__", "__getitems__", "__call__", "__iter__", "forward")


def reachable(root: Any, *, with_loops: bool = True) -> Iterator[Any]:
    """Yield ``root`` and the objects reachable from ``root``, nearest first.

    Numbers, strings, empty tuples, Python modules, and classes that are not the user's own are left out. So are objects
    that compile code or connect ranks, because their state is no part of a step.

    Args:
        root: the first object.
        with_loops: False to leave out objects of libraries that run the loop around the steps.
    """
    level, seen = [root], {id(root)}
    left_out = _MACHINERY if with_loops else _MACHINERY + _LOOPS
    for _ in range(_DEPTH):
        yield from level
        below: list[Any] = []
        for node in level:
            for child in _children(node):
                if id(child) not in seen and len(seen) < _NODES and _is_node(child, left_out):
                    seen.add(id(child))
                    below.append(child)
        level = below


def _is_node(value: Any, left_out: tuple[str, ...]) -> bool:
    kind = type(value)
    if kind in weakref.ProxyTypes:
        return False  # a dead one raises at any access
    if value is None or issubclass(kind, _NO_NODES) or (issubclass(kind, type) and not is_users(value.__module__)):
        return False
    if module_of(value).startswith(left_out):
        return False
    if kind is dict and "__name__" in value and "__spec__" in value:
        return False  # the names of a module, of which only those in the code count
    return kind is not tuple or len(value) > 0


def _children(node: Any) -> list[Any]:
    try:
        return _looked_into(node)
    except Exception:  # a closed file or a dead reference: the step cannot use such an object either
        return []


def _looked_into(node: Any) -> list[Any]:
    if node is None or isinstance(node, (*_NO_NODES, *_NOT_LOOKED_INTO)):
        return []
    if isinstance(node, torch.Tensor):
        return _hooks_of(node)
    if isinstance(node, types.MethodType):
        return [node.__self__, node.__func__, *_beside(node)]
    if isinstance(node, types.FunctionType):
        return _of_function(node)
    if isinstance(node, (staticmethod, classmethod)):
        return [node.__func__]
    if isinstance(node, property):
        return [node.fget, node.fset]
    if isinstance(node, type):
        return list(vars(node).values())
    if isinstance(node, functools.partial):
        return [node.func, *node.args, *node.keywords.values()]
    elements: list[Any]
    if is_hook_table(node):
        elements = [hook for _, hook in users_hooks(node)]
    elif isinstance(node, dict):
        elements = list(itertools.islice(node.values(), _WIDTH))
    elif isinstance(node, (list, tuple)):
        elements = list(node[:_WIDTH])
    elif isinstance(node, (set, frozenset, collections.deque)):
        elements = list(itertools.islice(node, _WIDTH))
    elif isinstance(node, nn.Module):
        return _of_module(node)
    elif not type(node).__dictoffset__ and type(node).__module__.partition(".")[0] in sys.stdlib_module_names:
        elements = gc.get_referents(node)  # of a class in C, such as the file of a csv.writer
    else:
        elements = []
    return [*elements, *attributes_of(node).values(), *_methods_of(node)]


def _of_module(module: nn.Module) -> list[Any]:
    """Return all submodules, the module's attributes and hooks, and the hooks of its parameters."""
    attributes = [value for name, value in vars(module).items() if name not in _OF_MODULE]
    hooks = [hook for parameter in module._parameters.values() for hook in _hooks_of(parameter)]
    return [*module.modules(), *attributes, *hooks, *_methods_of(module)]


def _hooks_of(tensor: torch.Tensor | None) -> list[Any]:
    """Return the gradient hooks of a leaf. Some optimizers step in such hooks, during the backward."""
    if tensor is None or not tensor.is_leaf:
        return []
    return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]


def attributes_of(node: Any) -> dict[str, Any]:
    """Return the attributes that an object stores in its ``__dict__`` and in slots."""
    found = dict(getattr(node, "__dict__", ()))
    for kind in type(node).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if isinstance(vars(kind).get(name), types.MemberDescriptorType) and hasattr(node, name):
                found[name] = getattr(node, name)
    return found


def _methods_of(node: Any) -> list[Any]:
    """Return the methods of an object that its caller or torch calls, and the user's own classes of the object."""
    methods = (getattr(type(node), name, None) for name in _METHODS)
    users = [kind for kind in type(node).__mro__ if is_users(kind.__module__)]
    return [*users, *(method for method in methods if isinstance(method, types.FunctionType))]


def _beside(method: types.MethodType) -> list[Any]:
    """Return the attributes of the class that defines ``method``, because the method may use them."""
    name = method.__func__.__qualname__.rpartition(".")[0]
    owner = next((cls for cls in type(method.__self__).__mro__ if cls.__qualname__ == name), object)
    return [] if owner is object else list(vars(owner).values())


def _of_function(function: types.FunctionType) -> list[Any]:
    """Return a function's closure, defaults and attributes, and the globals that its code names."""
    bound = [cell_contents(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    # Functions of other modules are left out, unless they are the user's: a library's functions reach too much.
    here = module_of(function)
    named = [
        found
        for bindings, _ in named_by(function)
        for found in bindings.values()
        if not isinstance(found, types.FunctionType) or module_of(found) == here or is_users(module_of(found))
    ]
    return [*bound, *defaults, *vars(function).values(), *named]


def named_by(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the globals that the code of a function names, and the same for the user's modules among them.

    Yields:
        The names with their values, and the namespace that holds them.
    """
    names = list(names_in(function.__code__))
    own = {name: function.__globals__[name] for name in names if name in function.__globals__}
    yield own, function.__globals__
    for module in own.values():
        if isinstance(module, types.ModuleType) and is_users(module.__name__):
            yield {name: vars(module)[name] for name in names if name in vars(module)}, vars(module)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that ``code`` and the functions defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def cell_contents(cell: types.CellType) -> Any:
    """Return the content of a closure's cell; None for a name that is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def module_of(value: Any) -> str:
    """Return the module whose code a function or method runs. For other objects, return the module of their class."""
    if type(value) is functools.partial:  # isinstance raises for a dead proxy
        value = value.func
    if type(value) is types.MethodType:
        value = value.__func__
    if type(value) is types.FunctionType:  # its `__module__` is the one of the function that it wraps
        return str(value.__globals__.get("__name__", ""))
    return str(type(value).__module__)


@functools.lru_cache(1024)
def is_users(module: str | None) -> bool:
    """Return True if a module is the user's own code: neither an installed package nor Python's library nor flatout."""
    top = (module or "").partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return True
    if not top or top in sys.stdlib_module_names or top in ("torch", "flatout"):
        return False
    file = os.path.realpath(getattr(sys.modules.get(module or ""), "__file__", None) or "")
    return not file.startswith(_library_folders()) and f"-packages{os.sep}" not in file


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.join(os.path.realpath(paths[name]), "") for name in ("stdlib", "purelib", "platlib"))

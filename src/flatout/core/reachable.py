"""Search for objects that an object can use.

The search follows attributes, elements, closures, defaults, and globals that the object's code names.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_DEPTH = 8  # levels of attributes and elements, where all submodules of a module are one level
_NODES = 20_000  # objects in all, nearest first: a dataset's annotations may be millions of objects
_WIDTH = 64  # elements per container: lists of transforms are short, lists of file names are long

_NO_NODES = (str, bytes, int, float, complex, type, types.ModuleType, np.ndarray, np.generic, torch.dtype, torch.device)
_OF_MODULE = frozenset(("_parameters", "_buffers", "_modules"))
_METHODS = ("__getitem__", "__getitems__", "__call__", "__iter__", "forward")


def reachable(root: Any) -> Iterator[Any]:
    """Yield ``root`` and the objects reachable from ``root``, nearest first.

    Numbers, strings, arrays, Python modules and classes are left out.
    """
    level, seen = [root], {id(root)}
    for _ in range(_DEPTH):
        yield from level
        below: list[Any] = []
        for node in level:
            for child in _children(node):
                if id(child) not in seen and len(seen) < _NODES and _is_node(child):
                    seen.add(id(child))
                    below.append(child)
        level = below


def _is_node(value: Any) -> bool:
    if value is None or issubclass(type(value), _NO_NODES):
        return False
    return type(value) not in (dict, collections.OrderedDict, list, tuple, set) or len(value) > 0


def _children(node: Any) -> list[Any]:
    try:
        return _looked_into(node)
    except Exception:  # a closed file or a dead reference: the step cannot use such an object either
        return []


def _looked_into(node: Any) -> list[Any]:
    if node is None or isinstance(node, (*_NO_NODES, types.CodeType)):
        return []
    if isinstance(node, torch.Tensor):
        return _hooks_of(node)
    if isinstance(node, types.MethodType):
        return [node.__self__, node.__func__, *_beside(node)]
    if isinstance(node, types.FunctionType):
        return _of_function(node)
    if isinstance(node, functools.partial):
        return [node.func, *node.args, *node.keywords.values()]
    if isinstance(node, dict):
        return list(itertools.islice(node.values(), _WIDTH))
    if isinstance(node, (list, tuple)):
        return list(node[:_WIDTH])
    if isinstance(node, (set, frozenset, collections.deque)):
        return list(itertools.islice(node, _WIDTH))
    if isinstance(node, nn.Module):
        return _of_module(node)
    return [*getattr(node, "__dict__", {}).values(), *_methods_of(node)]


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


def _methods_of(node: Any) -> list[Any]:
    methods = (getattr(type(node), name, None) for name in _METHODS)
    return [method for method in methods if isinstance(method, types.FunctionType)]


def _beside(method: types.MethodType) -> list[Any]:
    """Return the attributes of the class that defines ``method``, because the method may use them."""
    name = method.__func__.__qualname__.rpartition(".")[0]
    owner = next((cls for cls in type(method.__self__).__mro__ if cls.__qualname__ == name), object)
    return [] if owner is object else list(vars(owner).values())


def _of_function(function: types.FunctionType) -> list[Any]:
    """Return a function's closure, defaults and attributes, and the globals that its code names."""
    bound = [_cell_contents(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    # Functions of other modules are left out: a library's functions reach too much.
    here = function.__module__
    beside = [found for found in named if not isinstance(found, types.FunctionType) or found.__module__ == here]
    return [*bound, *defaults, *vars(function).values(), *beside]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that ``code`` and the functions defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def has_same_objects(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return True if both have the same names, and each name has one object in both."""
    return first.keys() == second.keys() and all(second[name] is value for name, value in first.items())

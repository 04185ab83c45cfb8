"""Subclass for one instance, which changes a module's methods reversibly and without visible traces.

If a method were replaced on the instance, copies would run with the original's weights, and paired hooks would break
under ``torch.compile``. A subclass for the one instance avoids both problems. For isinstance, hooks, ``state_dict``
and compilation the module stays the same. A copy or pickle is a plain object of the user's own class, byte for byte.
"""

from __future__ import annotations

import contextlib
import copyreg
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

_MADE = "flatout_instance_class"
"""Attribute that marks classes made by this file."""


class _Unannounced(nn.Module):
    """Base that hides classes made by this file from ``__init_subclass__`` of a user's class.

    The user's ``__init_subclass__`` may register every subclass.
    """

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


_in_pickler: weakref.WeakValueDictionary[tuple[int, int], _Items] = weakref.WeakValueDictionary()
"""Modules (by ``id``) that a pickler is about to write, each with the id of the pickler's thread."""


class _Items:
    """Iterator over the list items of a module to pickle. Most modules have none.

    A pickler writes ``__newobj__`` only with the class that ``__class__`` returns. Right after that, the pickler
    requests list items. So ``__class__`` returns the user's class until the pickler requests an item of this iterator.
    """

    def __init__(self, module: nn.Module, items: Iterator[Any] | None) -> None:
        self._items = iter(()) if items is None else items
        self._key = id(module), threading.get_ident()
        self._module = module  # keeps the module alive, so that its id is not reused
        _in_pickler[self._key] = self

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        _in_pickler.pop(self._key, None)
        return next(self._items)


class _PickledClass:
    """Descriptor that hides flatout's class of a module from picklers, which get the user's class instead."""

    def __get__(self, module: nn.Module, owner: type[nn.Module]) -> type[nn.Module]:
        is_written = bool(_in_pickler) and (id(module), threading.get_ident()) in _in_pickler
        return users_class(type(module)) if is_written else type(module)

    def __set__(self, module: nn.Module, cls: type[nn.Module]) -> None:
        _CLASS.__set__(module, cls)


_CLASS: Any = object.__dict__["__class__"]


def instance_class(base: type[nn.Module], **members: Any) -> type[nn.Module]:
    """Return a subclass of ``base`` with ``members``, whose pickles and copies have class ``base``."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        made, own = type(self), users_class(type(self))  # other code may have made classes below and above this one
        registered = copyreg.dispatch_table.get(own)
        reduced: Any = own.__reduce_ex__(self, protocol) if registered is None else registered(self)
        if isinstance(reduced, str):  # pickled as a global of this name
            return reduced
        make, args, *rest = reduced
        args = tuple(own if arg is made else arg for arg in args)
        if getattr(make, "__name__", "") not in ("__newobj__", "__newobj_ex__"):
            return (own if make is made else make, args, *rest)
        state, items, *rest = rest + [None] * (2 - len(rest))
        return (make, args, state, _Items(self, items), *rest)

    names: dict[str, Any] = {name: getattr(base, name) for name in ("__qualname__", "__module__", "__doc__")}
    make_class: Any = type(base)  # a metaclass of the user's own
    announced = any("__init_subclass__" in vars(cls) for cls in base.__mro__ if cls is not object)
    bases = (_Unannounced, base) if announced and not issubclass(base, _Unannounced) else (base,)
    added = {"__reduce_ex__": __reduce_ex__, "__class__": _PickledClass(), _MADE: True}
    subclass: type[nn.Module] = make_class(base.__name__, bases, names | members | added)
    return subclass


def users_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the first class in the MRO of ``cls`` that was not made by this file."""
    return next(each for each in cls.__mro__ if _MADE not in vars(each) and each is not _Unannounced)


def take_class_out(model: nn.Module, cls: type[nn.Module]) -> None:
    """Remove ``cls`` from a module's class. If other subclasses derive from ``cls``, they get its bases instead."""
    if type(model) is cls:
        model.__class__ = cls.__bases__[-1]
        return
    for above in type(model).__mro__:
        if above.__bases__[-1:] == (cls,):
            above.__bases__ = cls.__bases__
            return


def class_change(
    makers: Iterable[tuple[nn.Module, Callable[[Any], type[nn.Module]]]],
) -> Callable[[], Callable[[], None]]:
    """Return a function that gives modules other classes, and returns the function that takes these out again.

    The functions do not keep the modules alive. Each class is made once, because compiled code depends on the class.

    Args:
        makers: each module, with a function of the module's class that returns a subclass for the module.
    """
    references = [(weakref.ref(module), make) for module, make in makers]
    classes: dict[tuple[Any, type[nn.Module]], type[nn.Module]] = {}

    def change() -> Callable[[], None]:
        made = []
        for reference, make in references:
            if (module := reference()) is not None:
                key = make, type(module)
                if key not in classes:
                    classes[key] = make(type(module))
                module.__class__ = classes[key]
                made.append((reference, classes[key]))
        return partial(_revert, made)

    return change


def _revert(made: list[tuple[weakref.ref[nn.Module], type[nn.Module]]]) -> None:
    for reference, cls in reversed(made):
        if (module := reference()) is not None:
            take_class_out(module, cls)


@contextlib.contextmanager
def as_written(module: nn.Module) -> Iterator[None]:
    """Remove flatout's changes from an instance inside the block: its class, and the replacement of its call.

    Attributes that the block adds to the module and its parts are removed. TorchScript adds some.
    """
    made, module.__class__ = type(module), users_class(type(module))
    call = vars(module).pop("_compiled_call_impl", None)
    names = [(vars(m), set(vars(m))) for m in module.modules()]
    try:
        yield
    finally:
        for values, before in names:
            for name in values.keys() - before:
                del values[name]
        module.__class__, module._compiled_call_impl = made, call

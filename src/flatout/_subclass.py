"""A class for one instance: how a module's methods change, and change back, without anybody else noticing.

Replacing a method on the instance would make copies run the original's weights, and paired hooks break under
``torch.compile``. A subclass made for the one instance has neither fault: isinstance, hooks, ``state_dict`` and
compilation see the same module, and a copy or pickle of it is a plain object of the user's own class.
"""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn

_MADE = "flatout_instance_class"
"""Attribute of the classes made here."""


class _Unannounced(nn.Module):
    """Keeps ``__init_subclass__`` of a user's class (a registry, say) from hearing of classes made for an instance."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def instance_class(base: type[nn.Module], **members: Any) -> type[nn.Module]:
    """A subclass of ``base`` with ``members`` in it, whose pickles and copies are of class ``base``."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        made, own = type(self), users_class(type(self))  # others may have made classes below and above this one
        reduced: Any = own.__reduce_ex__(self, protocol)
        make, args, *rest = reduced
        if make is copyreg.__newobj__ and args == (made,):  # type: ignore[attr-defined]
            # Picklers insist that __newobj__ makes the object's own class; this one makes any.
            return (copyreg._reconstructor, (own, object, None), *rest)  # type: ignore[attr-defined]
        return (own if make is made else make, tuple(own if arg is made else arg for arg in args), *rest)

    names: dict[str, Any] = {name: getattr(base, name) for name in ("__qualname__", "__module__", "__doc__")}
    make_class: Any = type(base)  # a metaclass of the user's own
    announced = any("__init_subclass__" in vars(cls) for cls in base.__mro__ if cls is not object)
    bases = (_Unannounced, base) if announced and not issubclass(base, _Unannounced) else (base,)
    added = {"__reduce_ex__": __reduce_ex__, _MADE: True}
    subclass: type[nn.Module] = make_class(base.__name__, bases, names | members | added)
    return subclass


def users_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class without those made for a module here."""
    return next(each for each in cls.__mro__ if _MADE not in vars(each) and each is not _Unannounced)


def take_class_out(model: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module the class back that it had before ``cls``, or ``cls`` out of the middle where others followed."""
    if type(model) is cls:
        model.__class__ = cls.__bases__[-1]
        return
    for above in type(model).__mro__:
        if above.__bases__[-1:] == (cls,):
            above.__bases__ = cls.__bases__
            return

"""Mixed precision that lives inside a model and leaves with it: autocast by a per-instance subclass.

Replacing ``forward`` on the instance would make copies run the original's weights, and paired hooks break under
``torch.compile``. A subclass made for the one instance has neither fault: isinstance, hooks, ``state_dict`` and
compilation see the same module, and a copy or pickle of it is a plain model of the user's own class.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def autocast_class(base: type[nn.Module], device_type: str, dtype: torch.dtype) -> type[nn.Module]:
    """A subclass of ``base`` whose forward runs under autocast and returns float32.

    An autocast of the user's own around the call wins. Pickles and copies are of class ``base``.
    """

    class Autocast(base):  # type: ignore[valid-type, misc]
        flatout_autocast_dtype = dtype

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled(device_type):
                return base.forward(self, *args, **kwargs)
            with torch.autocast(device_type, dtype):
                output = base.forward(self, *args, **kwargs)
            return pytree.tree_map_only(Tensor, _to_float32, output)

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced: Any = base.__reduce_ex__(self, protocol)
            make, args, *rest = reduced
            if make is copyreg.__newobj__ and args == (Autocast,):  # type: ignore[attr-defined]
                # Picklers insist that __newobj__ makes the object's own class; this one makes any.
                return (copyreg._reconstructor, (base, object, None), *rest)  # type: ignore[attr-defined]
            return (make, tuple(base if arg is Autocast else arg for arg in args), *rest)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Autocast, name, getattr(base, name))
    return Autocast


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that flatout makes the model compute in; None when it does not."""
    return getattr(type(model), "flatout_autocast_dtype", None)

"""Autocast as part of a model, by a generated class whose forward computes in mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.core.instance_class import instance_class


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def autocast_class(base: type[nn.Module], device_type: str, dtype: torch.dtype) -> type[nn.Module]:
    """Return a subclass of ``base`` whose forward runs under autocast and returns float32.

    The user's own autocast around the call takes precedence. Pickles and copies have class ``base``.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _under_autocast(device_type, dtype, base.forward, self, *args, **kwargs)

    return instance_class(base, forward=forward, flatout_autocast_dtype=dtype, flatout_autocast_device=device_type)


def _under_autocast(
    device_type: str, dtype: torch.dtype, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if torch.is_autocast_enabled(device_type):
        return forward(*args, **kwargs)
    with torch.autocast(device_type, dtype):
        output = forward(*args, **kwargs)
    return pytree.tree_map_only(Tensor, _to_float32, output)


def call_as(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call another form of a model's forward, under the autocast that flatout added to the model, if any."""
    dtype = autocast_dtype(model)
    if dtype is None:
        return forward(*args, **kwargs)
    cls: Any = type(model)
    return _under_autocast(cls.flatout_autocast_device, dtype, forward, *args, **kwargs)


def autocast_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of flatout's autocast in the model, or None without such an autocast."""
    return getattr(type(model), "flatout_autocast_dtype", None)

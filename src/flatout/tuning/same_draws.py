"""Dispatch mode in which a model draws the same random numbers in any memory format and in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_NARROW = torch.float16, torch.bfloat16

_FUSED = "attention", "rnn"
"""Parts of the names of operators that draw inside of a kernel for one dtype."""


class SameDraws(TorchDispatchMode):
    """Dispatch mode in which random operators work on contiguous float32 copies of their arguments.

    torch draws in the order of memory, so the same seed gives an activation in channels_last another dropout mask. On a
    GPU, a kernel for 16-bit numbers assigns random numbers to elements in another way than a kernel for float32. Under
    this mode, an activation gets the same mask in all these forms. The mode cannot reach the random numbers that
    compiled code, attention and recurrent layers draw inside of their kernels.

    Attributes:
        drew: True after the model has drawn random numbers, if all of them were drawn under the mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._drew_here = self._drew_elsewhere = False

    @property
    def drew(self) -> bool:
        return self._drew_here and not self._drew_elsewhere

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **keywords)
        if any(part in func._schema.name for part in _FUSED):
            self._drew_elsewhere |= _drops(func, args, keywords)
            return func(*args, **keywords)
        self._drew_here = True
        wide = [_wide(arg) if isinstance(arg, Tensor) else arg for arg in args]
        dtype = keywords.get("dtype") or next((arg.dtype for arg in args if isinstance(arg, Tensor)), None)
        if keywords.get("dtype") in _NARROW:
            keywords = {**keywords, "dtype": torch.float32}
        result = func(*wide, **keywords)
        for given, copy, argument in zip(args, wide, func._schema.arguments, strict=False):
            if given is not copy and argument.is_write:
                given.copy_(copy)  # torch returns the argument and ignores the mode's result
        if dtype not in _NARROW:
            return result
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype is torch.float32 else t, result)


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _drops(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return True if an operator is called with a dropout probability above 0."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | keywords
    return any(bool(value) for name, value in named.items() if name in ("dropout", "dropout_p"))

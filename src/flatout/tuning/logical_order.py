"""Dispatch mode that draws random numbers in the logical order of elements, for any memory format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LogicalOrder(TorchDispatchMode):
    """Dispatch mode in which random operators work on contiguous copies of their arguments.

    torch draws in the order of memory, so the same seed gives an activation in channels_last another dropout mask.
    Under this mode both memory formats get the same mask. Compiled code runs unchanged, because the mode cannot reach
    the random numbers that fused kernels draw.

    Attributes:
        drew: True after an operator has drawn random numbers under the mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

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
        self.drew = True
        plain = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args]
        result = func(*plain, **keywords)
        for given, copy, argument in zip(args, plain, func._schema.arguments, strict=False):
            if given is not copy and argument.is_write:
                given.copy_(copy)  # torch returns the argument and ignores the mode's result
        return result

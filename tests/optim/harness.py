"""What these tests see of a step beside its result: which operators it calls, and whose step it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flatout.optim as fo
from flatout.optim.base import NativeStep


@contextlib.contextmanager
def only_native() -> Iterator[None]:
    """Refuse, inside the block, a step of torch's own code by one of flatout's optimizers.

    Both give the same numbers, so nothing that a user sees tells which was taken.
    """

    def refuse(*_: Any) -> None:
        raise AssertionError("torch's own step was taken")

    before, NativeStep._torch_update = NativeStep._torch_update, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeStep._torch_update = before  # type: ignore[method-assign]


class Calls(TorchDispatchMode):
    """Records, inside its block, the calls of flatout's operators.

    Attributes:
        calls: the name of each operator with its arguments and its result, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "flatout":
            self.calls.append((func.name().removeprefix("flatout::"), args, result))
        return result

    def count(self, operator: str) -> int:
        return sum(name == operator for name, *_ in self.calls)

    def made(self) -> list[int]:
        """The buckets that were made, by their numbers."""
        return [result for name, _, result in self.calls if name == "make_bucket"]

    def freed(self) -> list[int]:
        """Those of them that were freed."""
        freed = [args[0] for name, args, _ in self.calls if name == "free_bucket"]
        return [bucket for bucket in freed if bucket in self.made()]


def torch_class(name: str) -> Any:
    """Return the class that steps as an optimizer of this name must; torch has no Lion, so flatout brings a loop."""
    return fo.Lion._torch_class if name == "Lion" else getattr(torch.optim, name)

"""Recorder of the operators that a step calls, and a guard against steps of torch's code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from flatout.optim.native_step import NativeStep


@contextlib.contextmanager
def only_native() -> Iterator[None]:
    """Make flatout's optimizers raise inside the block if they fall back to torch's step.

    Both steps compute the same numbers, so the result does not show a fallback.
    """

    def refuse(*_: Any) -> None:
        raise AssertionError("torch's own step was taken")

    before, NativeStep._torch_update = NativeStep._torch_update, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeStep._torch_update = before  # type: ignore[method-assign]


class Calls(TorchDispatchMode):
    """Records the calls of flatout's operators inside its block.

    Attributes:
        calls: name, arguments and result of each call, in order.
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
        """Return the numbers of all buckets made inside the block."""
        return [result for name, _, result in self.calls if name == "make_bucket"]

    def freed(self) -> list[int]:
        """Return the numbers of all buckets both made and freed inside the block."""
        freed = [args[0] for name, args, _ in self.calls if name == "free_bucket"]
        return [bucket for bucket in freed if bucket in self.made()]

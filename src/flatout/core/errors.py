"""Errors of several packages, cleanup that continues after failures, and exhausted memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor


class Unsuitable(Exception):
    """Error of a way of running a step that cannot be used here. The message is one sentence for the report."""


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Call every action, then raise the first error.

    Raises:
        BaseException: the first error of an action. Later errors are its notes.
    """
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:  # even an interrupt must not leave the state half restored
            if first is None:
                first = error
            else:
                add_note(first, f"also failed: {type(error).__name__}: {error}")
    if first is not None:
        raise first


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an error. Python 3.10 stores the note but does not print it."""
    vars(error).setdefault("__notes__", []).append(note)


_params = itemgetter("params")


def ran_out_of_memory(error: BaseException) -> bool:
    """Return True if a device or torch's host allocator ran out of memory. A ``MemoryError`` does not count."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def versions(values: Sequence[Any]) -> list[int | None]:
    """Return the version counter of each tensor, which counts in-place writes. Other values get None."""
    return list(map(getattr, values, repeat("_version"), repeat(None)))


def free_memory(device: torch.device) -> None:
    """Free unused and cached memory. Call this after the error is freed, with the frames that hold its graph."""
    gc.collect()  # a caught error and its frames may hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state."""
    entries = (entry for entry in optimizer.state.values() if isinstance(entry, dict))
    return sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, Tensor))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the present parameters of an optimizer, group by group."""
    return list(chain.from_iterable(map(_params, optimizer.param_groups)))

"""Detection of out-of-memory errors, and of writes to tensors before such an error."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

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

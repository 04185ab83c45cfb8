"""Running out of memory: which errors say so, and what tells whether anything was written before."""

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
    """Whether a device, or torch's allocator on the host, had no memory left. A ``MemoryError`` is somebody else's."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def versions(values: Sequence[Any]) -> list[int | None]:
    """How often each tensor was written to, within 0.1 us for each; None for anything else."""
    return list(map(getattr, values, repeat("_version"), repeat(None)))


def free_memory(device: torch.device) -> None:
    """Give back all that nobody holds any more; once an error is gone, and with it the frames that hold its graph."""
    gc.collect()  # a caught error and its frames may hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    entries = (entry for entry in optimizer.state.values() if isinstance(entry, dict))
    return sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, Tensor))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer holds now, group by group, at C speed."""
    return list(chain.from_iterable(map(_params, optimizer.param_groups)))

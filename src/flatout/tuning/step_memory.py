"""Peak memory of a step above the resident memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import profiler

from flatout.core.kineto import allocated_peak, quiet_allocator, quiet_kineto
from flatout.distributed.agreement import ALONE, Agreement


def step_memory(
    step: Callable[[], object], device: torch.device, *, is_warm: bool = False, ranks: Agreement = ALONE
) -> int | None:
    """Return the peak memory of a step in bytes, above the memory that is allocated between steps.

    On CUDA the caching allocator counts the bytes, on the CPU torch's profiler.

    Args:
        step: a function that runs a step. It runs twice, and the second run counts, because the first run creates
            gradients and optimizer state.
        device: where the step runs.
        is_warm: True if gradients and optimizer state exist. Then the step runs once.
        ranks: the ranks that run the step. The largest memory counts.

    Returns:
        The bytes; None on the CPU while another profiler runs, because torch allows only one.
    """
    if device.type == "cuda":
        if not is_warm:
            step()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return int(ranks.largest([torch.cuda.max_memory_allocated(device) - before])[0])
    if not ranks.all_hold(not profiler._is_profiler_enabled):
        return None
    with quiet_kineto(), quiet_allocator(), profiler.profile(use_cpu=True, profile_memory=True) as profile:
        if not is_warm:
            step()
        with profiler.record_function("flatout.measured"):
            step()
    return int(ranks.largest([allocated_peak(profile, "flatout.measured", device)])[0])

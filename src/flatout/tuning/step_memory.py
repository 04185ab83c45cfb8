"""How much memory a step takes on top of what stays."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.autograd import profiler

from flatout.core.kineto import quiet_allocator, quiet_kineto


def step_memory(step: Callable[[], object], device: torch.device, *, is_warm: bool = False) -> int | None:
    """Bytes that a step allocates at its height, beyond what is allocated between steps.

    On CUDA as the caching allocator counts them, on the CPU as torch's profiler hears of them from the allocator.

    Args:
        step: runs twice; the second time counts, when gradients and optimizer state are there.
        device: where it runs.
        is_warm: they are there already, and the step runs once.

    Returns:
        None where somebody else profiles on the CPU: there can be one profiler only.
    """
    if device.type == "cuda":
        if not is_warm:
            step()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if profiler._is_profiler_enabled:
        return None
    with quiet_kineto(), quiet_allocator(), profiler.profile(use_cpu=True, profile_memory=True) as profile:
        if not is_warm:
            step()
        with profiler.record_function("flatout.measured"):
            step()
    events = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    begun = next(event.start_ns() for event in events if event.name() == "flatout.measured")
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() >= begun]
    return max(accumulate(sizes), default=0)

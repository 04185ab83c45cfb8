"""Times of calls on a CUDA device, apart from the times of the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

CYCLES_PER_SECOND = 2e9
"""Cycles of ``torch.cuda._sleep`` in a second. A lower clock makes the wait longer, which does no harm."""


def device_seconds(run: Callable[[], object], lead: float = 1e-3) -> tuple[float, bool]:
    """Return the seconds that a call takes on the device, and True if the device had to wait for the host.

    Args:
        run: the call.
        lead: seconds that the device is busy before the call. The host should queue the call within them.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(round(lead * CYCLES_PER_SECOND))
    begin.record()
    run()
    waited = begin.query()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, waited

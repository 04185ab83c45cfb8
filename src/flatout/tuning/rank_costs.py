"""Costs of training on several ranks: the times of each rank, and the speed of one rank without the others."""

from __future__ import annotations

from statistics import median
from typing import Any

from flatout.tuning.bench import Bench
from flatout.tuning.timing import timed_block

PAIRS = 3
"""Number of pairs of a block of all ranks and a block of one rank alone."""

UPDATES = 4 * PAIRS
"""Fewest updates of the measurement: each block follows an untimed update."""


def rank_costs(bench: Bench) -> dict[str, Any]:
    """Return more fields of a ``Pace``, with the kept candidates: ``ranks``, ``scaling``; none without other ranks."""
    if bench.job.stepper.sync is None:
        return {}
    block, times = bench.blocks(), bench.job.stepper.times
    bench.rewind()
    block(0)
    times.clear()
    pairs = [(block(i).mean, _alone(bench, i)) for i in range(PAIRS)]
    paces = times.paces
    bench.rewind()
    return {"ranks": paces, "scaling": median(alone / together for together, alone in pairs)}


def _alone(bench: Bench, i: int) -> float:
    """Return the mean seconds of an update of rank 0 alone. The other ranks rest meanwhile."""
    device, updates = bench.job.spec.device, range(i, i + bench.updates_per_block)
    with bench.ranks.attempt() as message:
        seconds = 0.0
        if bench.ranks.rank == 0:
            with bench.job.stepper.apart():
                bench.update(i)
                seconds = timed_block(bench.update, updates, device).mean
        message.values = [seconds]
    return message.received[0][0]

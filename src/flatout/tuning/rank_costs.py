"""Measurements of a training on several ranks: time to average gradients, times of each rank, speed of one rank."""

from __future__ import annotations

from statistics import median
from typing import Any

from flatout.training.parallel_stepper import ParallelStepper
from flatout.tuning.bench import Bench
from flatout.tuning.timing import timed_block

PAIRS = 3
"""Number of pairs of a block of all ranks, and a block without averaged gradients or of one rank alone."""

SHARE = 0.05
"""Largest share of the budget for each measurement of a cost."""

UPDATES = 4 * PAIRS
"""Fewest updates of the measurement: each block follows an untimed update."""


def exposed_ms(bench: Bench) -> float | None:
    """Return the milliseconds that averaging gradients adds to a step.

    The result is the time of a step with averaging, minus its time without. The result is None if the gradients are not
    averaged during the backward, or if the budget is too small. It is kept until a decision changes the steps.
    """
    stepper = bench.job.stepper
    if not isinstance(stepper, ParallelStepper) or stepper.sync is None or not stepper.averages_in_backward:
        return None
    if bench.exposed_ms is None and 2 * PAIRS * bench.block_seconds <= SHARE * bench.budget.seconds:
        block = bench.blocks()
        averaged, plain = [], []
        bench.rewind()
        for i in range(PAIRS):
            averaged.append(block(i).time("wall"))
            with stepper.sync.alone():
                plain.append(block(i).time("wall"))
        bench.rewind()
        bench.exposed_ms = max(0.0, 1e3 * (median(averaged) - median(plain)))
    return bench.exposed_ms


def rank_costs(bench: Bench) -> dict[str, Any]:
    """Return the fields ``ranks`` and ``scaling`` of a ``Pace`` with the kept candidates; empty for a single rank."""
    stepper = bench.job.stepper
    if not isinstance(stepper, ParallelStepper) or stepper.sync is None:
        return {}
    block = bench.blocks()
    bench.rewind()
    block(0)
    stepper.times.clear()
    pairs = [(block(i).mean, _alone(bench, stepper, i)) for i in range(PAIRS)]
    paces = stepper.times.paces
    bench.rewind()
    return {"ranks": paces, "scaling": median(alone / together for together, alone in pairs)}


def _alone(bench: Bench, stepper: ParallelStepper, i: int) -> float:
    """Return the mean seconds of an update of rank 0 alone. The other ranks wait meanwhile."""
    device, updates = bench.job.spec.device, range(i, i + bench.updates_per_block)
    with bench.ranks.attempt() as message:
        seconds = 0.0
        if bench.ranks.rank == 0:
            with stepper.apart():
                bench.update(i)
                seconds = timed_block(bench.update, updates, device).mean
        message.values = [seconds]
    return message.received[0][0]

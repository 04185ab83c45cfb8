"""Costs of a loop that complete its pace, such as the memory and the phases of a step and the loader's own rate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from statistics import median
from typing import Any

from flatout.mfu import MfuCounter
from flatout.training.device_verdict import tensor_watch
from flatout.training.parallel_stepper import ParallelStepper
from flatout.training.step_flops import peak_of
from flatout.tuning.bench import SHARE, Bench
from flatout.tuning.statistics import FEWEST_PAIRS
from flatout.tuning.stopwatch import ALONE_SECONDS, synchronize, timed_block, workers_and_queue

PHASE_UPDATES = 8
PHASE_SECONDS = 0.25
"""Limits of the phase measurement: a number of updates, and seconds after which no further update starts."""

FEWEST_UPDATES = 4
"""Fewest updates of a measurement: two for the memory of a step, and two for the phases of a step."""


def costs_of(bench: Bench) -> dict[str, Any]:
    """Return more fields of a ``Pace``, with the kept candidates on. Fields that would take too long are left out.

    The fields are ``step_bytes``, ``phases``, ``exposed_ms``, those of ``rank_costs`` and, if the loader can be
    rewound, ``loader_per_second``.
    """
    job, pace = bench.job, bench.pace
    told: dict[str, Any] = {}
    if _affords(bench, FEWEST_UPDATES * job.spec.accumulate * pace.step_ms):
        if bench.phases is None:
            bench.phases = _phases(bench)
        told |= {"step_bytes": bench.memory, "phases": bench.phases, "exposed_ms": exposed_ms(bench)}
    if _affords(bench, UPDATES * job.spec.accumulate * pace.step_ms):
        told |= rank_costs(bench)
    _, queue = workers_and_queue(job, job.data.source)
    if bench.rewindable and not queue and pace.load_ms >= 1e3 * ALONE_SECONDS:
        told["loader_per_second"] = pace.samples_per_second / pace.load_fraction
    elif bench.rewindable:
        bench.rewind()
        # A loader that fails here also fails in training, or has failed in its trial. Only its rate stays unknown.
        with closing(bench.watch()) as watch, suppress(Exception), job.spec.ranks.attempt():
            if _affords(bench, watch.fewest_alone * pace.total_ms):
                told["loader_per_second"] = watch.alone()
        bench.rewind()
    return told


def _affords(bench: Bench, ms: float) -> bool:
    return ms / 1e3 <= SHARE * bench.budget.seconds


def _phases(bench: Bench) -> Mapping[str, float]:
    """Return the share of each phase in an update's time, with the kept candidates. Set ``bench.tensor_cores``."""
    job = bench.job
    bench.rewind()
    bench.update(0)  # warms up
    synchronize(job.spec.device)
    peak = peak_of(job.spec, job.work)
    counter = MfuCounter(device=job.spec.device, phases_every=1, tensor_watch=tensor_watch(job))
    if peak.on_tensor_cores and job.work.counts:
        counter.flops_per_step = job.spec.accumulate * job.work.counts[0].hardware
        counter.peak_flops = peak.flops
    begun = bench.ranks.now()
    for i in range(1, 1 + PHASE_UPDATES):
        with counter.step() as step:
            bench.update(i, step.phase)
        if bench.ranks.now() - begun > PHASE_SECONDS:
            break
    synchronize(job.spec.device)
    bench.tensor_cores = counter.tensor_cores
    phases = bench.ranks.first(counter.total.phases)
    bench.rewind()
    if phases is None:  # phases on a GPU require flatout's CUDA kernels
        return {}
    named = {name: getattr(phases, name) for name in ("forward", "backward", "update")}
    whole = phases.total
    return {name: seconds / whole for name, seconds in (named | {"other": whole - sum(named.values())}).items()}


UPDATES = 4 * FEWEST_PAIRS
"""Fewest updates of the measurement: each block follows an untimed update."""


def exposed_ms(bench: Bench) -> float | None:
    """Return the milliseconds that averaging gradients adds to a step.

    The result is the time of a step with averaging, minus its time without. The result is None if the gradients are not
    averaged during the backward, or if the budget is too small. It is kept until a decision changes the steps.
    """
    stepper = bench.job.stepper
    if not isinstance(stepper, ParallelStepper) or stepper.sync is None or not stepper.averages_in_backward:
        return None
    if bench.exposed_ms is None and 2 * FEWEST_PAIRS * bench.block_seconds <= SHARE * bench.budget.seconds:
        block = bench.blocks()
        averaged, plain = [], []
        bench.rewind()
        for i in range(FEWEST_PAIRS):
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
    pairs = [(block(i).mean, _alone(bench, stepper, i)) for i in range(FEWEST_PAIRS)]
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

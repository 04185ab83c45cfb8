"""Race of the tuned loop against the original: decisions of trials are reverted if the tuned loop is slower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flatout.core.batches import batch_size_of
from flatout.report.model import Gain, Pace, Row
from flatout.techniques import Candidate
from flatout.tuning.bench import COSTS_SHARE, Bench, off
from flatout.tuning.loader_timer import LoaderTimer, Stretch, pace_of
from flatout.tuning.statistics import paired_gain
from flatout.tuning.trial import FEWEST_PAIRS
from flatout.tuning.trial_runner import scale_of

Paces = tuple[Pace | None, Pace | None]
"""Pace of the original loop and of the tuned loop; None if not measured."""


def race(bench: Bench) -> Paces:
    """Time the original loop against the tuned loop.

    A trial measures one technique, with those kept before it in use. The race measures the gain of all techniques
    that won a trial. Kept techniques that won none, such as forced ones, are on in both loops.

    Returns:
        The paces of both loops.
    """
    budget, won = bench.budget, bench.ledger.won
    if budget.seconds == 0:
        return None, None
    if not won:
        return bench.pace, bench.pace
    pace = bench.pace
    has_time = budget.left > 0
    budget.allow(COSTS_SHARE)
    if not has_time and not budget.fits(2 * FEWEST_PAIRS * bench.stretch_steps() * pace.total_ms / 1e3):
        return None, pace
    bench.rewind()
    candidates = [decision.candidate for decision in won if decision.candidate is not None]
    replaced_loader = any(decision.candidate is None for decision in won)
    if bench.rewindable:
        times, paces = _race_loops(bench, candidates, replaced_loader)
    else:
        times, paces = _race_steps(bench, candidates)
    gain = paired_gain(*times)
    if gain.high < 0.8 or (gain.high < 1.0 and len(times[0]) >= FEWEST_PAIRS):
        _revert(bench, candidates, replaced_loader, gain)
        paces = paces[0], paces[0]
    bench.rewind()
    return paces


Times = tuple[list[float], list[float]]


def _race_loops(bench: Bench, candidates: Sequence[Candidate], replaced_loader: bool) -> tuple[Times, Paces]:
    job = bench.job
    new = LoaderTimer(job, job.data.source)
    with off(*candidates):
        old = LoaderTimer(job, job.data.loader if replaced_loader else job.data.source)
    scale = math.prod(map(scale_of, candidates))
    times = bench.alternate(old, new, candidates, scale)
    return times, (old.pace.scaled(scale), new.pace)


def _race_steps(bench: Bench, candidates: Sequence[Candidate]) -> tuple[Times, Paces]:
    """Race on the trial's batches alone, because the race must not read the loader."""
    job, new = bench.job, bench.turns()

    def old(i: int) -> float:
        with off(*candidates):
            return new(i)

    times = bench.interleave(old, new)
    samples = job.spec.accumulate * batch_size_of(job.data.batches[0])
    before, after = (pace_of(Stretch(took, 0.0, samples, job.spec.accumulate) for took in each) for each in times)
    return times, (before, after)


def _revert(bench: Bench, candidates: Sequence[Candidate], replaced_loader: bool, gain: Gain) -> None:
    """Turn off the techniques that trials kept, and reject them in the report."""
    why = f"paid alone, but everything kept together ran at {gain.ratio:.2f} times the original speed"

    def rejected(row: Row) -> Row:
        return replace(row, status="rejected", chosen="", why=why)

    for candidate in reversed(candidates):
        candidate.disable()
    if replaced_loader:
        bench.use(bench.job.data.loader)
    bench.ledger.revert_trials(rejected)
    bench.forget()

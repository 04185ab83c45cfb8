"""Runner of trials: any error of a candidate is a reason to reject it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from flatout.core import formatting
from flatout.core.batches import tensors_within
from flatout.core.errors import Unsuitable
from flatout.core.out_of_memory import free_memory, ran_out_of_memory
from flatout.report.model import Trial
from flatout.techniques import (
    Candidate,
    LoaderCandidate,
    NotApplicable,
    RecordedCandidate,
    ResizingCandidate,
    StepTechnique,
)
from flatout.tuning.acceptance import saves_bytes
from flatout.tuning.bench import LONG_UPDATE, TRIAL_SECONDS, Bench, off
from flatout.tuning.block import Block
from flatout.tuning.equivalence import (
    FEWEST_UPDATES,
    LEEWAY,
    UPDATES,
    Difference,
    Observed,
    compare,
    nudge,
    observe,
)
from flatout.tuning.loader_timer import LoaderTimer
from flatout.tuning.logical_order import LogicalOrder
from flatout.tuning.noise import Pair
from flatout.tuning.timing import seconds
from flatout.tuning.trial import PairedTrial

HOPELESS = 3.0
"""Slowdown on the first pair above which a candidate is not tried further."""


def attempt(bench: Bench, label: str, trial: Callable[[], Trial]) -> Trial:
    """Run a trial, and return one without a gain if it fails.

    Raises:
        NotApplicable: the trial found that its technique does not apply.
    """
    try:
        return trial()
    except NotApplicable:
        raise
    except Unsuitable as reason:
        failure = str(reason)
    except Exception as error:
        failure = formatting.first_line(error)
        if ran_out_of_memory(error):
            failure = f"it ran out of memory: {failure}"
    # Here the error is freed, and with it the frames that hold the trial's tensors.
    bench.rewind()
    free_memory(bench.job.spec.device)
    return Trial(label, bench.pace.step_ms, math.nan, None, 0, failure=failure)


@dataclass(frozen=True)
class Screening:
    """Screening of a candidate: a first pair, and its numerics.

    Attributes:
        pair: a step without and with the candidate.
        trial: record of the screening: the pair, the setup, and the differences in numerics.
    """

    pair: Pair
    trial: Trial

    @property
    def is_hopeless(self) -> bool:
        """True if the pair is enough: emulated 16-bit arithmetic can be ten times slower."""
        baseline, candidate = self.pair
        return candidate.time("wall") > HOPELESS * baseline.time("wall")


def screen(bench: Bench, candidate: Candidate, techniques: Sequence[StepTechnique]) -> Screening:
    """Warm a candidate up, time one step, and compare its numerics with the baseline's unless it is hopeless.

    Args:
        bench: the training.
        candidate: a candidate of one technique, or of a pair.
        techniques: the techniques. All their checks of numerics apply.
    """
    took = warm_up(bench, candidate)
    setup = max(0.0, took - len(_batches_of_each_shape(bench)) * bench.pace.step_ms / 1e3)
    paired = PairedTrial(bench.noise, keeps_cpu_time=False)
    paired.add(_first_pair(bench, candidate))
    found = Screening(
        paired.pairs[0], replace(paired.record(candidate.label, bench.job.spec.accumulate), setup_seconds=setup)
    )
    if found.is_hopeless:
        return found
    measured = differences(bench, candidate, techniques)
    by = {d.what: d.by for d in measured}
    trial = replace(
        found.trial,
        loss_difference=by.get("losses"),
        output_difference=by.get("outputs"),
        gradient_difference=by.get("gradients"),
        failure="; ".join(str(d) for d in measured if d.fails) or candidate.failure,
    )
    return replace(found, trial=trial)


def step_trial(bench: Bench, candidate: Candidate, techniques: Sequence[StepTechnique]) -> Trial:
    """Time steps with a candidate against steps with the kept candidates only; see ``screen`` for the arguments."""
    job, scale, to_record = bench.job, scale_of(candidate), _steps_to_record(candidate)
    first = screen(bench, candidate, techniques)
    if first.is_hopeless or first.trial.failure:
        return first.trial
    block = bench.blocks()

    def old(i: int) -> Block:
        return block(i).scaled(scale)

    def new(i: int) -> Block:
        with candidate:
            return block(i)

    memory = (None, None) if scale != 1.0 else (bench.memory, bench.memory_with(candidate))
    bench.rewind()
    for i in range(to_record * len(job.data.batches)):
        new(i)
    paired = bench.trial(
        old,
        new,
        keeps_cpu_time=all(t.keeps_cpu_time for t in techniques),
        has_other_merits=saves_bytes(*memory),
    )
    timed = paired.record(candidate.label, job.spec.accumulate)
    trial = replace(
        first.trial,
        baseline_ms=timed.baseline_ms,
        candidate_ms=timed.candidate_ms,
        gain=timed.gain,
        pairs=timed.pairs,
        failure=candidate.failure,
    )
    if scale != 1.0:  # a larger batch takes more memory, and its first step is no set-up
        return trial
    trial = replace(trial, baseline_bytes=memory[0], candidate_bytes=memory[1])
    saved = (trial.baseline_ms - trial.candidate_ms) / 1e3
    if setup_estimate(bench, techniques) and saved > 0:
        trial = replace(trial, break_even_steps=trial.setup_seconds / saved)
    return trial


def loader_trial(bench: Bench, candidate: LoaderCandidate, made: list[Any], *, has_other_merits: bool = False) -> Trial:
    """Time training from a candidate against training from the present loader.

    Args:
        bench: the training.
        candidate: the loader to try.
        made: receives the loader that ``candidate`` makes.
        has_other_merits: True if the candidate needs only be no slower.
    """
    job = bench.job
    bench.rewind()
    setup = seconds(lambda: made.append(candidate.make()), torch.device("cpu"))
    with bench.loops(LoaderTimer(job, job.data.source), LoaderTimer(job, made[0])) as (old, new):
        paired = PairedTrial(bench.loader_noise(old), has_other_merits=has_other_merits)
        paired.run(old, new, *bench.budget.deadlines(TRIAL_SECONDS))
    return replace(paired.record(candidate.label, 1), setup_seconds=setup)


def rule_trial(bench: Bench, candidate: Candidate) -> Trial:
    """Time steps with a rule's candidate, which is on, against steps without."""
    new = bench.blocks()

    def old(i: int) -> Block:
        with off(candidate):
            return new(i)

    bench.rewind()
    new(0), old(0)  # each compiles its own code
    bench.rewind()
    return bench.trial(old, new, keeps_cpu_time=True).record(candidate.label, bench.job.spec.accumulate)


def warm_up(bench: Bench, candidate: Candidate) -> float:
    """Run a batch of each shape with the candidate, and return the seconds."""
    job = bench.job
    bench.rewind()
    with candidate:
        batches = _batches_of_each_shape(bench)
        took = seconds(lambda: [job.stepper.step(batch) for batch in batches], job.spec.device)
        candidate.end_warmup()
    return took


def setup_estimate(bench: Bench, techniques: Sequence[StepTechnique]) -> float:
    """Return the seconds that candidates of these techniques take before their first timed step."""
    return sum(technique.setup_estimate(bench.job, bench.pace) for technique in techniques)


def scale_of(candidate: Candidate) -> float:
    """Return the samples of a step with a candidate, relative to a step without."""
    return candidate.scale if isinstance(candidate, ResizingCandidate) else 1.0


def _steps_to_record(candidate: Candidate) -> int:
    return candidate.steps_to_record if isinstance(candidate, RecordedCandidate) else 0


def _batches_of_each_shape(bench: Bench) -> list[Any]:
    by_shape = {tuple(t.shape for t in tensors_within(batch)): batch for batch in bench.job.data.batches}
    return list(by_shape.values())


def _first_pair(bench: Bench, candidate: Candidate) -> Pair:
    block, batches = bench.blocks(), len(bench.job.data.batches)
    bench.rewind()
    old = block(0).scaled(scale_of(candidate))
    with candidate:
        for i in range(_steps_to_record(candidate) * batches):
            bench.update(i)
        return old, block(0)


def differences(bench: Bench, candidate: Candidate, techniques: Sequence[StepTechnique]) -> list[Difference]:
    """Return the differences of the candidate's outputs, gradients and losses from the baseline's."""
    if not any(t.is_verified for t in techniques) or scale_of(candidate) != 1.0:  # other samples have other outputs
        return []
    job, evaluation = bench.job, any(t.checks_evaluation for t in techniques)
    is_long = bench.update_seconds > LONG_UPDATE
    batches = job.data.batches[: job.spec.accumulate] if is_long else job.data.batches
    updates = FEWEST_UPDATES if is_long else UPDATES
    draws_other_numbers = any(t.effect_on(job) == "reseeded" for t in techniques)
    order = LogicalOrder() if draws_other_numbers and any(t.reorders_memory for t in techniques) else None

    def seen() -> Observed:
        with order or nullcontext():
            return observe(job, batches, evaluation=evaluation, updates=updates)

    bench.rewind()
    baseline = seen()
    bench.rewind()
    with candidate:
        observed = seen()
        found = compare(baseline, observed)
    if any(d.fails for d in found if d.what != "losses"):
        bench.rewind()
        nudge(job.spec.model, observed.dtype)
        nudged = compare(baseline, seen())
        found = [d if d.what == "losses" else _allow(d, LEEWAY * n.by) for d, n in zip(found, nudged, strict=True)]
    if draws_other_numbers and not (order and order.drew) and any(d.fails for d in found):
        bench.rewind()
        torch.manual_seed(torch.initial_seed() + 1)
        redrawn = compare(baseline, seen())
        found = [_allow(d, 2 * r.by) for d, r in zip(found, redrawn, strict=True)]
    return found


def _allow(difference: Difference, much: float) -> Difference:
    return replace(difference, allowed=max(difference.allowed, much))

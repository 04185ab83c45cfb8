"""Runner of trials. Any error of a candidate is a reason to reject the candidate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.core import formatting
from flatout.core.batches import sizes_of, tensors_within
from flatout.core.errors import Unsuitable, free_memory, ran_out_of_memory
from flatout.core.standard_error import trials as log
from flatout.report.model import Row, Trial
from flatout.techniques import (
    Candidate,
    LoaderCandidate,
    Measured,
    NotApplicable,
    PairCandidate,
    StepTechnique,
)
from flatout.tuning.acceptance import HOPELESS, saves_bytes
from flatout.tuning.bench import TRIAL_SECONDS, Bench, off
from flatout.tuning.ledger import Decision
from flatout.tuning.numerics import is_verified, verify
from flatout.tuning.pairs import Pair, PairedTrial
from flatout.tuning.ranks import failure_of
from flatout.tuning.statistics import FEWEST_FOR_INTERVAL, FEWEST_PAIRS
from flatout.tuning.stopwatch import Block, LoaderComparison, Stopwatch, seconds

HOPELESS_WARM_UP = 2.0
"""Seconds that a warm-up may take beyond ``HOPELESS`` times the expected time, if the candidate has no setup.

A slower candidate is hopeless. A warm-up also loads libraries and starts threads. Emulated 16-bit arithmetic can make a
step a hundred times slower.
"""


def attempt(bench: Bench, label: str, trial: Callable[[], Trial]) -> Trial:
    """Run a trial. If it fails, return a trial without a gain.

    Raises:
        NotApplicable: the trial found that its technique does not apply.
    """
    log.debug("trial of %s", label)
    screened = bench.screened
    try:
        with bench.progress.candidate(label), bench.ranks.attempt():
            return trial()
    except NotApplicable:
        bench.screened = screened
        raise
    except Unsuitable as reason:
        failure = str(reason)
    except Exception as error:
        failure = formatting.first_line(error)
        if ran_out_of_memory(error):
            failure = f"it ran out of memory: {failure}"
    log.debug("trial of %s failed: %s", label, failure)
    # Here the error is freed, and with it the frames that hold the trial's tensors.
    bench.screened = screened  # some ranks may have come further than others
    bench.rewind()
    free_memory(bench.job.spec.device)
    return Trial(label, bench.pace.step_ms, math.nan, None, 0, failure=failure)


@dataclass(frozen=True, eq=False)
class Screening:
    """Screening of a candidate: a first pair, and its numerics.

    Attributes:
        techniques: one technique, or the two techniques of a pair.
        candidate: the candidate.
        pair: a block without and with the candidate.
        trial: record of the screening: the pair, the setup, and the differences in numerics.
        is_apart: True if other candidates were screened between the two blocks.
        instead_of: the screening whose candidate is on in the first block; None if none is.
    """

    techniques: Sequence[StepTechnique]
    candidate: Candidate
    pair: Pair
    trial: Trial
    is_apart: bool = False
    instead_of: Screening | None = None

    @property
    def is_hopeless(self) -> bool:
        """True if the first pair rejects the candidate. Emulated 16-bit arithmetic can be ten times slower."""
        baseline, candidate = self.pair
        return candidate.time("wall") > HOPELESS * baseline.time("wall")


def screen(bench: Bench, candidate: Candidate, techniques: Sequence[StepTechnique]) -> Screening:
    """Warm a candidate up, time one block, and compare its numerics with the baseline's unless it is hopeless.

    If a candidate without setup is hopeless in its warm-up, the time of the warm-up replaces the block. Long updates
    are timed while their numerics are compared, and need a warm-up only if the candidate compiles or records code.

    Args:
        bench: the training.
        candidate: a candidate of one technique, or of a pair.
        techniques: the techniques of the candidate. The numerical checks of all of them apply.
    """
    setup, pair, verification = 0.0, None, None
    begun, kept = bench.ranks.now(), bench.kept_seconds
    has_setup = not all(technique.may_combine(bench.job) for technique in techniques)
    if has_setup or not bench.is_long:
        took, expected = warm_up(bench, candidate), len(_batches_of_each_shape(bench)) * bench.pace.step_ms / 1e3
        if has_setup or took < HOPELESS_WARM_UP + HOPELESS * expected:
            setup = max(0.0, took - expected)
        else:
            update = bench.update_seconds
            pair = Block((update,), cpu=0.0), Block((update * took / expected,), cpu=0.0)  # no CPU time is compared
    if bench.is_long and is_verified(candidate, techniques) and not candidate.steps_to_record:
        limit = HOPELESS_WARM_UP + HOPELESS * bench.update_seconds  # the first update is a warm-up
        verification = verify(bench, candidate, techniques, limit)
    is_apart = verification is not None and verification.pair is not None
    pair = pair or (verification and verification.pair) or _first_pair(bench, candidate)
    paired = PairedTrial(bench.noise, keeps_cpu_time=False, ranks=bench.ranks)
    paired.add(pair)
    timed = replace(paired.record(candidate.label, bench.job.spec.accumulate), setup_seconds=setup)
    screening = Screening(techniques, candidate, pair, timed, is_apart)
    if screening.is_hopeless:
        return screening
    verification = verification or verify(bench, candidate, techniques)
    by = {difference.what: difference.by for difference in verification.differences}
    trial = replace(
        timed,
        loss_difference=by.get("losses"),
        output_difference=by.get("outputs"),
        gradient_difference=by.get("gradients"),
        failure=verification.failure or failure_of(bench.ranks, candidate),
    )
    spent = bench.ranks.now() - begun - setup - (bench.kept_seconds - kept)
    bench.screened = max(0.0, spent) / bench.update_seconds
    return replace(screening, trial=trial)


def step_trial(bench: Bench, candidate: Candidate, techniques: Sequence[StepTechnique]) -> Trial:
    """Time steps with a candidate against steps with the kept candidates only. Arguments are those of ``screen``."""
    job, scale, to_record = bench.job, candidate.scale, candidate.steps_to_record
    first = screen(bench, candidate, techniques)
    if first.is_hopeless or first.trial.failure:
        return first.trial
    block = bench.blocks()

    def old(i: int) -> Block:
        return block(i).scaled(scale)

    def new(i: int) -> Block:
        with candidate:
            for k in range(candidate.steps_to_switch):
                bench.update(i + k)
            return block(i)

    memory = (bench.memory, bench.memory_with(candidate)) if scale == 1.0 and bench.measures_memory else (None, None)
    bench.rewind()
    for i in range(to_record * len(job.data.batches)):
        new(i)
    paired = bench.trial(
        old,
        new,
        earlier=[first.pair] if bench.is_long else [],
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
        noise=timed.noise,
        failure=failure_of(bench.ranks, candidate),
    )
    if scale != 1.0:  # a larger batch takes more memory, and its first step is no setup
        return trial
    trial = replace(trial, baseline_bytes=memory[0], candidate_bytes=memory[1])
    saved = (trial.baseline_ms - trial.candidate_ms) / 1e3
    if setup_estimate(bench, techniques) and saved > 0:
        trial = replace(trial, break_even_steps=trial.setup_seconds / saved)
    return trial


def loader_trial(
    bench: Bench,
    candidate: LoaderCandidate,
    found: list[tuple[Iterable[Any], LoaderComparison]],
    *,
    has_other_merits: bool = False,
) -> Trial:
    """Time training from a candidate against training from the present loader.

    Args:
        bench: the training.
        candidate: the loader to try.
        found: receives the loader that ``candidate`` makes, and the comparison.
        has_other_merits: True if being no slower is enough for the candidate.
    """
    job = bench.job
    bench.rewind()
    begun = time.perf_counter()
    made = candidate.make()
    setup = bench.ranks.largest([time.perf_counter() - begun])[0]
    watches = Stopwatch(job, job.data.source), Stopwatch(job, made)
    with bench.loops(*watches) as (old, new):
        noise = bench.loader_noise(old)
        paired = PairedTrial(noise, has_other_merits=has_other_merits, ranks=bench.ranks)
        begun = bench.ranks.now()
        # The trial of the only technique that wins can replace the race, so this trial may take the race's time.
        deadlines = bench.budget.deadlines(TRIAL_SECONDS, with_race=not bench.ledger.won)
        paired.run(old, new, *deadlines, fewest=FEWEST_PAIRS, alternates=bench.is_slow)
        pair_seconds = (bench.ranks.now() - begun) / len(paired.pairs)
    before, after = (watch.pace for watch in watches)
    floor = noise.floors["wall"]
    found.append((made, LoaderComparison(job.data.source, before, after, paired.gain, floor, pair_seconds)))
    return replace(paired.record(candidate.label, job.spec.accumulate), setup_seconds=setup)


def keep_parts(bench: Bench, row: Row, candidate: Candidate, *companions: tuple[StepTechnique, str]) -> Row:
    """Keep a candidate that won, and return the row of its first technique, which has the gain.

    Args:
        bench: the training.
        row: the row of the first technique.
        candidate: a candidate of one technique, or a pair.
        companions: the techniques of the other parts of a pair, with the reasons in their rows.
    """
    first, *others = candidate.parts if isinstance(candidate, PairCandidate) else (candidate,)
    row = bench.keep(Decision(row, "trial", first.value, first))
    for (technique, why), part in zip(companions, others, strict=True):
        bench.keep(Decision(technique.row("kept", why, part.label), "trial", part.value, part))
    return row


def together_with(technique: StepTechnique) -> str:
    """Return the reason in the row of a technique that was kept in a pair with this one."""
    return f"tried together with {technique.title}, whose row has the gain of both"


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
    with candidate, bench.progress.ticking():
        batches = _batches_of_each_shape(bench)
        took = seconds(lambda: [job.stepper.step(batch) for batch in batches], job.spec.device, bench.ranks)
        candidate.end_warmup()
    return took


def setup_estimate(bench: Bench, techniques: Sequence[Measured]) -> float:
    """Return the seconds that candidates of these techniques take before their first timed step."""
    estimates = [technique.setup_estimate(bench.job, bench.pace) for technique in techniques]
    return sum(bench.ranks.largest(estimates))


def screening_seconds(bench: Bench, candidates: int = 1) -> float:
    """Return the seconds to screen candidates, and to time the fewest pairs, without setup.

    The latest screening gives the cost of the next one. The estimate of the first one counts the fewest updates.
    Results of the baseline count once, and not at all if an earlier screening has measured them.
    """
    updates = candidates * (2 if bench.screened is None else bench.screened) + bench.updates_to_observe
    return updates * bench.update_seconds + FEWEST_FOR_INTERVAL * 2 * bench.block_seconds


def _batches_of_each_shape(bench: Bench) -> list[Any]:
    """Return a batch of each shape. A rank with fewer shapes than another repeats some."""
    by_shape = {tuple(map(sizes_of, tensors_within(batch))): batch for batch in bench.job.data.batches}
    count = int(bench.ranks.largest([len(by_shape)])[0])
    return list(itertools.islice(itertools.cycle(by_shape.values()), count))


def _first_pair(bench: Bench, candidate: Candidate) -> Pair:
    block, batches = bench.blocks(), len(bench.job.data.batches)
    bench.rewind()
    old = block(0).scaled(candidate.scale)
    with candidate:
        for i in range(candidate.steps_to_record * batches):
            bench.update(i)
        return old, block(0)


def settle(bench: Bench) -> None:
    """Choose where gradients are kept, and run steps.

    DDP learns in these steps the order of the gradients, and whether some gradients are missing. With more than two
    ranks, the order changes the rounding of sums. Without these steps, a resumed training would therefore differ in its
    first update. Out-of-memory errors are ignored, because later stages find parts of batches that fit.
    """
    job, sync = bench.job, bench.job.stepper.sync
    if sync is None or job.spec.is_recorded:  # a script's DDP has its final buckets
        return
    # Gradients in the buckets save a copy of each gradient. A user's own loop may keep gradients longer than a step.
    sync.options = replace(sync.options, gradient_as_bucket_view=not job.why_no_step)
    try:
        with bench.ranks.attempt():
            for _ in range(max(1, job.stepper.steps_to_settle - 1)):  # the next step begins with the new buckets
                job.stepper.step(job.data.batches[0])
    except RuntimeError as error:
        if not (sync.allow_unused(error) or ran_out_of_memory(error)):
            raise
    bench.rewind()


def refresh(bench: Bench) -> None:
    """Make a new DDP if the decisions have changed its options or the memory format, and settle it."""
    stepper = bench.job.stepper
    if stepper.sync is not None and (stepper.sync.refresh() or stepper.steps_to_settle > 1):
        settle(bench)


def warm_up_forced(bench: Bench, candidate: Candidate) -> None:
    """Run a batch of each shape with a forced candidate.

    Raises:
        Unsuitable: steps fail with the candidate, or the candidate has fallen back to plain steps.
        Exception: steps also fail without the candidate.
    """
    try:
        with bench.ranks.attempt():
            warm_up(bench, candidate)
    except (NotApplicable, Unsuitable):
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise Unsuitable(f"it ran out of memory: {formatting.first_line(error)}") from error
        bench.rewind()
        for batch in bench.job.data.batches:
            bench.job.stepper.step(batch)
        raise Unsuitable(formatting.first_line(error)) from error
    failure = failure_of(bench.ranks, candidate)
    if failure:
        raise Unsuitable(failure)

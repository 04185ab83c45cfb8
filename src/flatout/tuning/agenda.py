"""Search and confirmation: decide every technique, then race the tuned loop against the original."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flatout.core import formatting
from flatout.core.errors import Unsuitable, free_memory
from flatout.core.machine import load_average, usable_cores
from flatout.data.loaders import length_of
from flatout.guards import MeanOverSamples
from flatout.plan import CACHED, Plan
from flatout.report.model import Gain, Pace, Row, Statistic, Status
from flatout.techniques import REGISTRY, Advice, LoaderTechnique, Measured, NotApplicable, Rule, StepTechnique
from flatout.techniques.batch_size import BatchCandidate, largest_batch, size_of
from flatout.training.batch_size_change import BatchSizeChange
from flatout.training.device_verdict import judged
from flatout.training.job import Job
from flatout.training.learning_rate import ScaledSchedule
from flatout.training.step_flops import peak_of
from flatout.tuning.acceptance import KEEP_ABOVE
from flatout.tuning.batch_sizes import memory_limit, parts_that_fit
from flatout.tuning.bench import Bench
from flatout.tuning.budget import Budget
from flatout.tuning.combinations import decide_factors
from flatout.tuning.costs import costs_of
from flatout.tuning.ledger import Decision, Ground
from flatout.tuning.numerics import verify
from flatout.tuning.plan_cache import forget_decision, key_of, read_plan, write_plan
from flatout.tuning.progress import log
from flatout.tuning.race import RaceResult, race, race_once, shortest_race
from flatout.tuning.ranks import applies_on_all, failure_of
from flatout.tuning.request import BATCH_SIZE, Choices
from flatout.tuning.session import EARLIER, Session
from flatout.tuning.trials import refresh, warm_up
from flatout.tuning.tuner import Tuner

ADVICE_SHARE = 0.05
"""Share of the budget that advice may take after all trials, because advice is cheap."""


@dataclass(frozen=True)
class Baseline:
    """Measurements of the original loop.

    Attributes:
        peak_flops: peak in FLOP/s that MFU refers to; None if unknown.
        costs: more fields of its ``Pace``.
    """

    peak_flops: float | None
    costs: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of a confirmation.

    Attributes:
        before: pace of the original loop; None if not measured.
        after: pace of the tuned loop; None if not measured.
        gain: speed of the tuned loop relative to the original, from the race; None without a race.
        gain_statistic: the time that ``gain`` compares.
        verdict: text about the utilization of the device, and about what limits it.
        peak_flops: peak in FLOP/s that MFU refers to; None if unknown.
    """

    before: Pace | None
    after: Pace | None
    gain: Gain | None
    gain_statistic: Statistic
    verdict: str
    peak_flops: float | None


def search(session: Session) -> Baseline:
    """Decide the batch size and then every technique, in the order of the registry.

    Raises:
        ValueError: a forced technique cannot be kept, or a decision disagrees with the plan.
    """
    baseline, bench, tuner = measured_baseline(session), session.bench, session.tuner
    measured = [technique for technique in REGISTRY if isinstance(technique, Measured)]
    seconds = {technique.name: tuner.seconds_for(technique) for technique in measured}
    bench.budget.later = sum(seconds.values())
    if session.job.spec.resizes:  # all later decisions are made at this size
        with session.stage(f"trying {BATCH_SIZE.title}"):
            tuner.decide(BATCH_SIZE)
    for technique in REGISTRY:
        candidate = session.ledger.rules.get(technique.name)
        if isinstance(technique, Rule) and technique.is_priced and candidate is not None and session.measures:
            with session.stage(f"timing {technique.title}"):
                tuner.price(technique.name, candidate)
    others = [t for t in measured if not (isinstance(t, StepTechnique) and t.may_combine(session.job))]
    bench.budget.later = sum(seconds[technique.name] for technique in others)
    with session.stage("trying combinations of techniques"):
        decided = decide_factors(tuner, bench, measured)
    left = [technique for technique in measured if technique.name not in decided]
    for i, technique in enumerate(left):
        bench.budget.later = sum(seconds[later.name] for later in left[i + 1 :])
        with session.stage(f"trying {technique.title}"):
            tuner.decide(technique)
    _look_again(session)
    return baseline


def _look_again(session: Session) -> None:
    """Try undecided techniques that look faster again with the time that is left, the most promising one first.

    Each trial left time for all later techniques, and these may have taken less time.
    """
    bench, ledger = session.bench, session.ledger
    undecided = [t for t in REGISTRY if isinstance(t, Measured) and t.name in ledger.undecided]
    gains = {t: KEEP_ABOVE if (gain := ledger.row(t.name).gain) is None else gain.ratio for t in undecided}
    bench.budget.later = 0.0
    for technique in sorted(undecided, key=lambda technique: -gains[technique]):
        if gains[technique] >= KEEP_ABOVE and session.tuner.seconds_for(technique):
            with session.stage(f"trying {technique.title} again"):
                session.tuner.decide(technique)


def measured_baseline(session: Session, *, is_brief: bool = False) -> Baseline:
    """Apply the requested batch size, settle the budget, and measure the original loop.

    Args:
        session: the session.
        is_brief: leave out the costs of steps and of the loader.
    """
    request, bench = session.request, session.bench
    on_gpu = session.job.spec.device.type == "cuda"
    checks = not session.first_step_fits or request.memory_limit is not None or (session.measures and on_gpu)
    checks = checks and not session.job.objective.why_untried
    with session.stage("applying the batch size"):
        apply_batch_size(session.tuner, bench, session.choices, request.batch_size, checks_memory=checks)
    with session.stage("measuring the original loop"):
        session.settle_budget()
        if session.measures:
            session.progress.budget = bench.budget
            bench.budget.reserve(shortest_race(bench))
        peak = _peak_of(session)
        return Baseline(peak, costs_of(bench) if session.measures and not is_brief else {})


def confirm(session: Session, baseline: Baseline) -> Outcome:
    """Race the tuned loop against the original, revert decisions that do not help, and collect advice."""
    bench = session.bench
    with session.stage("racing the tuned loop against the original"):
        has_won = bool(bench.ledger.won)
        _peak_of(session)  # in the time that trials have left, because the race may need the rest
        result = race(bench)
        if has_won and not bench.ledger.won:
            session.notes.append(f"no gain could be shown: {noise_and_load(bench)}")
    return conclude(session, baseline, result)


def outcome_of(session: Session, baseline: Baseline, result: RaceResult) -> Outcome:
    """Return the result of a race, with the costs and the utilization of both loops.

    Args:
        session: the session, with its decisions.
        baseline: measurements of the original loop.
        result: result of the race.
    """
    job, bench = session.job, session.bench
    peak = _peak_of(session)
    before = _completed(result.before, job, baseline.peak_flops, baseline.costs)
    after = _completed(result.after, job, peak, costs_of(bench) if session.measures else {})
    verdict = ""
    if after is not None:
        verdict = str(judged(job, after.mfu, session.rows, bench.tensor_cores, stall_fraction=after.load_fraction))
    return Outcome(before, after, result.gain, result.statistic, bench.ranks.first(verdict), peak)


def conclude(session: Session, baseline: Baseline, result: RaceResult) -> Outcome:
    """End all trials after the last race, and collect advice. Arguments and result are those of ``outcome_of``."""
    job, bench, outcome = session.job, session.bench, outcome_of(session, baseline, result)
    for technique in REGISTRY:
        if isinstance(technique, Advice):
            with session.stage(f"looking at {technique.title}"):
                row = _advise(technique, session)
                session.ledger.add(Decision(row))
    refresh(bench)
    job.data.batches = ()
    for candidate in session.ledger.candidates:
        candidate.on_tuning_end()
    bench.rewind(to_train=False)
    session.end_tuning(result.gain)
    return outcome


def noise_and_load(bench: Bench) -> str:
    """Return the noise of steps and the load of the machine, for the report."""
    facts = [] if bench.known_noise is None else [f"noise here is ±{1.96 * bench.known_noise:.0%}"]
    load = load_average()
    facts += [] if load is None else [f"the load is {load:.1f} on {usable_cores()} cores"]
    return ", ".join(facts) or "the noise here is unknown"


def _advise(technique: Advice, session: Session) -> Row:
    """Return the row of an advice, which may take a share of the budget."""
    row, ranks = technique.row("not tried", ""), session.job.spec.ranks
    if session.choices.of(technique) is False:
        return replace(row, why="techniques= does without it")
    try:
        with applies_on_all(ranks):
            technique.check(session.job)
        if not session.measures:
            return replace(row, why="nothing is evaluated without a budget or with a plan")
        with ranks.attempt():
            row = _found(technique, session)
        return ranks.first(row)
    except NotApplicable as reason:
        return replace(row, status="not applicable", why=str(reason))
    except Exception as error:  # the user's code may fail, because training has not run this part yet
        return replace(row, status="not applicable", why=f"looking failed with {formatting.first_line(error)}")


def _found(technique: Advice, session: Session) -> Row:
    """Return the row of an advice that applies, as this rank finds it."""
    row = technique.row("advice", "")
    try:
        found = technique.findings(session.job, ADVICE_SHARE * session.bench.budget.seconds)
    except NotApplicable as reason:
        return replace(row, status="not applicable", why=str(reason))
    return replace(row, why="\n".join(found))


def _peak_of(session: Session) -> float | None:
    """Return the peak of this rank's device in FLOP/s, which MFU refers to; None if unknown.

    A measurement has to fit into the budget. Only rank 0 measures the peak of a CPU, because the ranks would disturb
    each other.
    """
    job, ranks = session.job, session.job.spec.ranks
    left = session.bench.budget.left
    has_own = ranks.rank == 0 or job.spec.device.type == "cuda"
    own = peak_of(job.spec, job.work, seconds=left if ranks.rank == 0 else 0.0).flops if has_own else None
    of_first = ranks.first(own)
    return of_first if own is None else own


def _completed(pace: Pace | None, job: Job, peak: float | None, costs: Mapping[str, Any]) -> Pace | None:
    """Return a pace with its MFU, on all devices and on each, and other costs."""
    samples, _, flops = job.work(job.data.batches[0])
    if pace is None:
        return None
    ranks = job.spec.ranks
    batches = pace.samples_per_second / ranks.total(samples)
    known = ranks.every(None if flops is None or peak is None else (batches * flops.total, peak))
    completed = replace(pace, **costs)
    if None in known:
        return completed
    used, most = zip(*filter(None, known), strict=True)
    of_ranks = [replace(of_rank, mfu=used[of_rank.rank] / most[of_rank.rank]) for of_rank in completed.ranks]
    return replace(completed, mfu=sum(used) / sum(most), ranks=tuple(of_ranks))


PARTS_ARE_EQUAL = MeanOverSamples()


def apply_batch_size(
    tuner: Tuner, bench: Bench, choices: Choices, batch_size: str | int, *, checks_memory: bool
) -> None:
    """Apply the requested batch size, and split batches that do not fit in memory.

    Args:
        tuner: tuner on ``bench``.
        bench: the training.
        choices: techniques that are forbidden or forced.
        batch_size: argument of ``optimize``, in samples per update if it is a number.
        checks_memory: True to test with steps whether whole batches fit in memory.

    Raises:
        ValueError: the batch size cannot be applied.
        torch.OutOfMemoryError: a single sample does not fit in memory, or batches cannot be computed in parts.
    """
    job = bench.job
    memory_techniques = [t for t in REGISTRY if isinstance(t, StepTechnique) and t.goal == "memory"]
    for technique in memory_techniques:
        if choices.of(technique):
            tuner.decide(technique)
    if choices.of(BATCH_SIZE):
        tuner.decide(BATCH_SIZE)
        return
    if job.spec.optimizer is None or choices.plan is not None or choices.of(BATCH_SIZE) is False:
        return
    if isinstance(batch_size, int):
        asked = BATCH_SIZE.forced(job, {"samples": batch_size // job.spec.accumulate})
        tuner.impose(BATCH_SIZE, asked, "batch_size= asks for it")
    bench.rewind()
    if not checks_memory:
        return
    failure: torch.OutOfMemoryError | None = None
    try:
        with bench.ranks.attempt():
            parts = parts_that_fit(job)
    except torch.OutOfMemoryError as error:
        failure = error
    bench.rewind()
    if failure is None and parts is not None and (reason := tuner.contradiction(PARTS_ARE_EQUAL)):
        whole = formatting.size_of(int(memory_limit(job)))
        failure = torch.OutOfMemoryError(
            f"batches of {largest_batch(job)} do not fit into {whole}, and cannot be computed in parts: {reason}"
        )
    if failure is None:
        _impose_parts(parts, tuner, bench)
        return
    free = [technique for technique in memory_techniques if choices.of(technique) is None]
    if not any(_fits_with(technique, tuner, bench) for technique in free):
        raise failure


def _impose_parts(parts: BatchCandidate | None, tuner: Tuner, bench: Bench) -> None:
    """Split batches that do not fit in memory."""
    if parts is not None:
        result = bench.job.stepper.micro_batches.result()
        why = f"whole batches do not fit into memory: they are computed in parts, {result}"
        tuner.impose(BATCH_SIZE, parts, why)


def _fits_with(technique: StepTechnique, tuner: Tuner, bench: Bench) -> bool:
    """Keep a technique if batches, or parts of batches, fit in memory with it. Return True if it is kept."""
    try:
        with bench.ranks.attempt():
            technique.check(bench.job)
            candidate = technique.candidates(bench.job)[0]
            with candidate:
                parts = parts_that_fit(bench.job)
    except Exception:  # the model may not allow the change, or not even one sample may fit in memory
        return False
    finally:
        bench.rewind()
    if parts is not None and tuner.contradiction(PARTS_ARE_EQUAL):
        return False
    tuner.impose(technique, candidate, f"batches do not fit into memory otherwise: {technique.rationale}")
    _impose_parts(parts, tuner, bench)
    return True


def scaled_schedule(bench: Bench, scheduler: Any, *, own_size: int, own_loader: Iterable[Any]) -> ScaledSchedule | None:
    """Return the schedule of learning rates for another batch size; None if the size is the user's own.

    Args:
        bench: the training, whose ledger records the changes.
        scheduler: the user's scheduler; None without one.
        own_size: samples per batch of the user's loader.
        own_loader: the user's loader.
    """
    job = bench.job
    optimizer, accumulate, size = job.spec.optimizer, job.spec.accumulate, size_of(job)
    if optimizer is None or size == own_size:
        return None
    change = BatchSizeChange(
        rule=job.spec.lr_rule,
        samples=(own_size * accumulate, size * accumulate),
        updates=(math.ceil(length_of(own_loader) / accumulate), math.ceil(length_of(job.data.loader) / accumulate)),
        training=math.ceil(job.data.expected_steps / accumulate),
    )
    row = bench.ledger.row(BATCH_SIZE.name)
    bench.ledger.amend(replace(row, why="; ".join([row.why, *change.told(optimizer)])))
    return change.schedule(optimizer, scheduler)


RACE_SECONDS = 2.0
RACE_PAIRS = 3
"""Seconds of the race of a cached plan, and its fewest pairs. The race takes longer if the pairs do."""

SOURCE = "the cached plan"
"""Origin of the decisions, for the report."""


def decide(session: Session) -> Outcome:
    """Decide every technique, by the cached plan if it holds here, or else by a search. The result is cached."""
    if not session.request.measures:
        return confirm(session, search(session))
    key = key_of(session)
    ranks = session.job.spec.ranks
    plan = ranks.first(read_plan(key) if session.request.plan == CACHED and ranks.rank == 0 else None)
    repeated = None if plan is None else repeat(session, plan)
    if plan is None or repeated is None:
        outcome = confirm(session, search(session))
    else:
        outcome = _complete(session, plan, *repeated)
    if session.measures and ranks.rank == 0:
        write_plan(key, session.plan())
        session.job.breaks.forget = partial(forget_decision, key)
    return outcome


def techniques_to_try(session: Session, plan: Plan) -> list[Measured]:
    """Return the techniques that this start spends its budget on, although the plan holds.

    The plan's undecided techniques are tried again, each once. If the plan was made under load and the machine is quiet
    now, all techniques that the plan does not keep are tried.
    """
    if session.job.spec.deterministic:
        return []
    is_quiet = session.load_average is not None and session.load_average <= session.cores
    tries_all = plan.is_made_under_load and is_quiet
    return [
        technique
        for technique in REGISTRY
        if isinstance(technique, Measured)
        and session.choices.of(technique) is None
        and technique.name not in plan.decisions
        and (tries_all or technique.name in plan.undecided)
    ]


def repeat(session: Session, plan: Plan) -> tuple[Baseline, RaceResult] | None:
    """Apply a plan and race it against the original loop.

    Returns:
        The baseline and the result of the race. None if the plan fails or loses. Then all decisions are as before.
    """
    before, source = session.ledger.decisions, session.job.data.source
    try:
        with session.job.spec.ranks.attempt():
            baseline = measured_baseline(session, is_brief=True)
            if not session.measures:  # the training is too short to compare anything
                _roll_back(session, before, source)
                return None
            with session.stage("checking the cached plan"):
                session.repeated = plan
                _apply(session, plan)
                result = _race(session.bench)
        is_lost = result.gain is not None and result.gain.high < 1.0
        failure = "the tuned loop was slower than the original" if is_lost else ""
    except Exception as error:  # a candidate may no longer work
        failure = formatting.first_line(error)
    if failure:
        session.notes.append(f"{SOURCE} failed ({failure}), so trials decided again")
        log(session.notes[-1], session.logs)
        _roll_back(session, before, source)
        return None
    session.notes.append(
        f"the decisions come from {SOURCE} of an earlier start. optimize(plan=None) measures all techniques again"
    )
    return baseline, result


def _complete(session: Session, plan: Plan, baseline: Baseline, result: RaceResult) -> Outcome:
    """Try the techniques that the plan left undecided, and end the trials."""
    techniques = techniques_to_try(session, plan)
    if not techniques:
        return conclude(session, baseline, result)
    session.repeated, session.retried = None, frozenset(plan.undecided)
    for technique in techniques:
        with session.stage(f"trying {technique.title}"):
            session.tuner.decide(technique)
    return confirm(session, baseline)


def _apply(session: Session, plan: Plan) -> None:
    """Apply the decisions of a plan that apply here, in the order of the registry.

    Raises:
        Exception: a decision failed.
    """
    ledger, ranks = session.ledger, session.job.spec.ranks
    for technique in REGISTRY:
        if not isinstance(technique, Measured):
            continue
        value = plan.decisions.get(technique.name, False)
        if ledger.is_kept(technique.name) and value in (False, ledger.values[technique.name]):
            continue
        if session.choices.of(technique) is not None:
            session.tuner.decide(technique)
            continue
        try:
            session.tuner.check(technique)
            if value is False:
                ledger.add(Decision(_left_out(technique, plan)))
            else:
                with ranks.attempt():
                    keep(session, technique, value)
        except NotApplicable as reason:
            ledger.add(Decision(technique.row("not applicable", str(reason))))


def _left_out(technique: Measured, plan: Plan) -> Row:
    """Return the row of a technique that a plan does without, with the reason if the plan has it."""
    status, why = plan.left_out.get(technique.name, ("not tried", ""))
    known: Status = "rejected" if status == "rejected" else "not tried"
    return technique.row(known, f"{EARLIER}{why}" if why else f"{SOURCE} does without it")


def keep(session: Session, technique: Measured, value: Any) -> None:
    """Turn a technique on after another comparison of its numerics.

    Raises:
        NotApplicable: the candidate does not apply to this job.
        Unsuitable: the numerics differ, or the technique may not be used here.
        ValueError: the technique has no candidate with this value.
    """
    job, bench = session.job, session.bench
    if job.spec.deterministic and technique.effect_on(job) != "exact":
        raise Unsuitable(f"deterministic=True: {technique.title} may change the last bits")
    candidate = technique.forced(job, value)
    row = technique.row("kept", f"{SOURCE} asks for it: {technique.rationale_on(job)}", candidate.label)
    # A race may revert decisions of trials only.
    ground: Ground = "choice" if job.spec.deterministic else "trial"
    if isinstance(technique, LoaderTechnique):
        if not bench.rewindable:
            raise Unsuitable("the loader cannot be rewound: another in its place would lose samples")
        bench.use(candidate.make())
        session.ledger.add(Decision(row, ground, candidate.value))
        return
    assert isinstance(technique, StepTechnique)
    warm_up(bench, candidate)
    failure = verify(bench, candidate, [technique]).failure or failure_of(bench.ranks, candidate)
    if failure:
        raise Unsuitable(f"{technique.title}: {failure}")
    bench.rewind()
    # The warm-up may have settled the candidate's label and value.
    bench.keep(Decision(replace(row, chosen=candidate.label), ground, candidate.value, candidate))


def _race(bench: Bench) -> RaceResult:
    """Race the tuned loop against the original for a short time, within the budget."""
    own = bench.budget
    bench.budget = Budget(min(RACE_SECONDS, own.seconds), bench.ranks)
    try:
        return race_once(bench, fewest=RACE_PAIRS)
    finally:
        bench.budget = own


def _roll_back(session: Session, decisions: Sequence[Decision], source: Iterable[Any]) -> None:
    """Turn off everything that a plan turned on, and return to earlier decisions."""
    bench, ledger = session.bench, session.ledger
    session.repeated = None
    for candidate in reversed(ledger.candidates):
        candidate.disable()
        candidate.release()
    ledger.reset(decisions)
    bench.use(source)
    bench.forget()
    bench.rewind()
    free_memory(session.job.spec.device)

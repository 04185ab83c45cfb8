"""Search and confirmation: decide every technique, then race the tuned loop against the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.core import formatting
from flatout.core.machine import load_average, usable_cores
from flatout.report.model import Gain, Pace, Row, Statistic
from flatout.techniques import REGISTRY, Advice, Measured, NotApplicable, Rule, StepTechnique
from flatout.training.device_verdict import judged
from flatout.training.job import Job
from flatout.training.step_flops import peak_of
from flatout.tuning.batch_size_stage import apply_batch_size
from flatout.tuning.bench import Bench
from flatout.tuning.choices import BATCH_SIZE
from flatout.tuning.combination_stage import decide_factors
from flatout.tuning.costs import costs_of
from flatout.tuning.ledger import Decision
from flatout.tuning.lockstep import applies_on_all
from flatout.tuning.race import RaceResult, race, shortest_race
from flatout.tuning.session import Session
from flatout.tuning.trial import KEEP_ABOVE
from flatout.tuning.trial_runner import refresh

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

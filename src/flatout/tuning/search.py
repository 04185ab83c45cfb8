"""Search and confirmation: decide every technique, then race the tuned loop against the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.core import formatting
from flatout.report.model import Pace, Row
from flatout.techniques import REGISTRY, Advice, Measured, NotApplicable, PricedRule, ResizingCandidate
from flatout.training.device_verdict import judged
from flatout.training.job import Job
from flatout.training.step_flops import peak_of
from flatout.tuning.batch_size_stage import apply_batch_size
from flatout.tuning.choices import BATCH_SIZE
from flatout.tuning.ledger import Decision
from flatout.tuning.race import race
from flatout.tuning.session import Session, announced

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
        verdict: utilization of the device, and its limit, in words.
        peak_flops: peak in FLOP/s that MFU refers to; None if unknown.
    """

    before: Pace | None
    after: Pace | None
    verdict: str
    peak_flops: float | None


def search(session: Session) -> Baseline:
    """Decide the batch size and then every technique, in the order of the registry.

    Raises:
        ValueError: a forced technique cannot be kept, or a decision disagrees with the plan.
    """
    request, bench, tuner = session.request, session.bench, session.tuner
    on_gpu = session.job.spec.device.type == "cuda"
    checks = not session.first_step_fits or request.memory_limit is not None or (session.measures and on_gpu)
    apply_batch_size(tuner, bench, session.choices, request.batch_size, checks_memory=checks)
    session.settle_budget()
    peak, _ = peak_of(session.job.spec, measure=bench.budget.seconds > 0)
    baseline = Baseline(peak, bench.costs() if session.measures else {})
    if session.job.spec.resizes:  # all later decisions are made at this size
        with announced(f"trying {BATCH_SIZE.title}"):
            tuner.decide(BATCH_SIZE)
    for technique in REGISTRY:
        candidate = session.ledger.rules.get(technique.name)
        if isinstance(technique, PricedRule) and candidate is not None and session.measures:
            with announced(f"timing {technique.title}"):
                tuner.price(technique.name, candidate)
    for technique in REGISTRY:
        if isinstance(technique, Measured):
            with announced(f"trying {technique.title}"):
                tuner.decide(technique)
    return baseline


def confirm(session: Session, baseline: Baseline) -> Outcome:
    """Race the tuned loop against the original, revert decisions that do not pay, and collect advice."""
    job, bench = session.job, session.bench
    with announced("racing the tuned loop against the original"):
        before, after = race(bench)
    peak, _ = peak_of(job.spec, measure=bench.budget.seconds > 0)
    before = _completed(before, job, baseline.peak_flops, baseline.costs)
    after = _completed(after, job, peak, bench.costs() if session.measures else {})
    verdict = "" if after is None else str(judged(job, after.mfu, session.rows, stall_fraction=after.load_fraction))
    for technique in REGISTRY:
        if isinstance(technique, Advice):
            with announced(f"looking at {technique.title}"):
                row = _advise(technique, session)
                session.ledger.add(Decision(row))
    job.data.batches = ()
    for candidate in session.ledger.candidates:
        if isinstance(candidate, ResizingCandidate):
            candidate.on_tuning_end()
    bench.rewind(to_train=False)
    return Outcome(before, after, verdict, peak)


def _advise(technique: Advice, session: Session) -> Row:
    """Return the row of an advice, which may take a share of the budget."""
    row = technique.row("not tried", "")
    if session.choices.of(technique) is False:
        return replace(row, why="techniques= does without it")
    try:
        technique.check(session.job)
        if not session.measures:
            return replace(row, why="nothing is evaluated without a budget or with a plan")
        found = technique.findings(session.job, ADVICE_SHARE * session.bench.budget.seconds)
        return replace(row, status="advice", why="\n".join(found))
    except NotApplicable as reason:
        return replace(row, status="not applicable", why=str(reason))
    except Exception as error:  # of the user's code, which training has not run yet
        return replace(row, status="not applicable", why=f"looking failed with {formatting.first_line(error)}")


def _completed(pace: Pace | None, job: Job, peak: float | None, costs: Mapping[str, Any]) -> Pace | None:
    """Return a pace with its MFU and other costs."""
    samples, _, flops = job.work(job.data.batches[0])
    if pace is None:
        return None
    mfu = None if flops is None or peak is None else pace.samples_per_second * flops.total / samples / peak
    return replace(pace, mfu=mfu, **costs)

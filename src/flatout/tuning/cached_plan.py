"""Cached plan: the decisions of an earlier start, verified and raced here before they replace a search.

A deterministic training uses the cache, too. It times only bit-identical techniques, so a cached decision cannot change
a result. No timing changes the plan of a deterministic training. The plan is applied without a race, so that all starts
make the same decisions. This module does not apply a plan that the user gives, such as ``Plan.from_checkpoints``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flatout.core import formatting
from flatout.core.errors import Unsuitable, free_memory
from flatout.plan import CACHED, Plan
from flatout.report.model import Row, Status
from flatout.techniques import REGISTRY, LoaderTechnique, Measured, NotApplicable, StepTechnique
from flatout.tuning.bench import Bench
from flatout.tuning.budget import Budget
from flatout.tuning.ledger import Decision, Ground
from flatout.tuning.lockstep import failure_of
from flatout.tuning.plan_key import key_of
from flatout.tuning.plan_store import forget_decision, read_plan, write_plan
from flatout.tuning.progress import log
from flatout.tuning.race import RaceResult, race_once
from flatout.tuning.search import Baseline, Outcome, conclude, confirm, measured_baseline, search
from flatout.tuning.session import EARLIER, Session
from flatout.tuning.trial_runner import warm_up
from flatout.tuning.verification import verify

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

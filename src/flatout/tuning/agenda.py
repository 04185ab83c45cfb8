"""Agenda: open questions about techniques, each with a promise and a cost. The budget's seconds answer them.

If all questions fit into the time that is left, the order of the registry counts, because later techniques build on
earlier ones. Otherwise the question that promises most per second of its trial comes first. ``optimize`` is one long
turn, and ``flatout run`` takes many short turns between updates. A cached plan consists of answers to check, and a
forced technique is an answer without a question. A trial that decides nothing leaves its question open.

A deterministic training uses cached plans, too. It times only bit-identical techniques, so a cached decision cannot
change a result. The plan is applied without a race, so that all starts make the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flatout.core import formatting
from flatout.core.errors import Unsuitable, free_memory
from flatout.core.machine import load_average, usable_cores
from flatout.data.stages import Stage, in_words
from flatout.plan import Plan
from flatout.report.model import Pace, Row, Status
from flatout.techniques import REGISTRY, Advice, LoaderTechnique, Measured, NotApplicable, Rule, StepTechnique
from flatout.training.device_verdict import judged
from flatout.training.job import Job
from flatout.training.spec import CACHED
from flatout.training.step_flops import peak_of
from flatout.tuning.acceptance import least_saving
from flatout.tuning.arguments import BATCH_SIZE
from flatout.tuning.bench import SHARE, TRIAL_SECONDS, Bench
from flatout.tuning.budget import RACE_SHARE, Budget
from flatout.tuning.combinations import Combinations
from flatout.tuning.costs import costs_of
from flatout.tuning.ledger import Decision, Ground
from flatout.tuning.numerics import verify
from flatout.tuning.plan_cache import forget_decision, key_of, read_plan, write_plan
from flatout.tuning.progress import log
from flatout.tuning.race import Outcome, race, race_once, shortest_race
from flatout.tuning.ranks import applies_on_all, failure_of
from flatout.tuning.session import EARLIER, Session
from flatout.tuning.statistics import FEWEST_PAIRS
from flatout.tuning.trials import refresh, screening_seconds, warm_up

RACE_SECONDS = 2.0
"""Seconds of the race of a cached plan. The race takes longer if its fewest pairs do."""

WARM_COMPILE_SECONDS = 8.0
"""Estimated seconds of a compilation whose code is in torch's cache, with the first step."""

ROOM = 1.1
"""Time of a turn relative to its estimate, as a safety margin."""

SOURCE = "the cached plan"
"""Origin of the decisions, for the report."""


def decide(session: Session) -> Outcome:
    """Decide every technique of ``optimize``, by the cached plan if it holds here, or else by trials. Cache the result.

    Raises:
        ValueError: a forced technique cannot be kept, or a decision disagrees with the plan.
    """
    agenda, spec = Agenda(session), session.job.spec
    ranks = spec.ranks
    if not spec.measures:
        return agenda.run()
    key = key_of(session)
    outcome = agenda.run(ranks.first(read_plan(key) if spec.plan == CACHED and ranks.rank == 0 else None))
    if session.measures and ranks.rank == 0:
        write_plan(key, session.plan())
        session.job.breaks.forget = partial(forget_decision, key)
    return outcome


class Agenda:
    """Open questions about the techniques of a prepared session.

    Args:
        session: the session.

    Attributes:
        open: techniques without an answer, in the order of the registry.
        answers: decisions of a cached plan that wait for a check, by technique.
        result: result of the last race, or None before the first race.
    """

    def __init__(self, session: Session) -> None:
        self.open = [technique for technique in REGISTRY if isinstance(technique, Measured)]
        self.answers: dict[str, Any] = {}
        self.result: Outcome | None = None
        self.session = session
        self._tried: dict[Measured, float] = {}
        """Techniques that were tried, with the total seconds of their trials."""
        self._raced: Sequence[Decision] = ()
        self._peak: float | None = None
        self._costs: Mapping[str, Any] = {}

    def run(self, plan: Plan | None = None) -> Outcome:
        """Answer all questions in one turn, race the tuned loop against the original, and end the trials."""
        session, ledger = self.session, self.session.ledger
        self.begin(plan)
        self.answer()
        for technique in self.open:
            if not self._tried.get(technique):
                session.tuner.decide(technique)  # its row gives the reason why it is not tried
        if self.result is None or self._raced != ledger.won:
            with session.stage("racing the tuned loop against the original"):
                has_won = bool(ledger.won)
                self._peak_of_device()  # in the time that trials have left, because the race may need the rest
                self.result = race(session.bench)
            if has_won and not ledger.won:
                session.notes.append(f"no gain could be shown: {noise_and_load(session.bench)}")
        return self.end()

    # Turns

    def begin(self, plan: Plan | None = None) -> None:
        """Check the answers of a plan, or measure the original loop without one."""
        session = self.session
        if plan is not None and self._repeat(plan):
            return
        self._measure_baseline(is_brief=session.job.spec.is_recorded)
        if session.job.spec.resizes:  # all later decisions are made at this size
            with session.stage(f"trying {BATCH_SIZE.title}"):
                session.tuner.decide(BATCH_SIZE)
        for rule in REGISTRY:
            candidate = session.ledger.rules.get(rule.name)
            if isinstance(rule, Rule) and rule.is_priced and candidate is not None and session.measures:
                with session.stage(f"timing {rule.title}"):
                    session.tuner.price(rule.name, candidate)

    def answer(self) -> None:
        """Answer open questions while there is time."""
        session, bench = self.session, self.session.bench
        if session.measures:
            bench.budget.reserve(shortest_race(bench))
        for technique in [t for t in self.open if session.choices.of(t) is False]:
            self._ask([technique])
        while question := self._next():
            self._ask(question)

    def race(self) -> bool:
        """Race the kept techniques if they are new. Techniques that the race reverts are open again.

        Returns:
            True if there was a race.
        """
        session, won = self.session, self.session.ledger.won
        if won == self._raced:
            return False
        begun = session.bench.ranks.now()
        self.result = race(session.bench)
        self._raced = session.ledger.won
        reverted = {decision.technique for decision in won} - {decision.technique for decision in self._raced}
        for technique in REGISTRY:
            if isinstance(technique, Measured) and technique.name in reverted:
                self.open.append(technique)
                self._tried[technique] = self._tried.get(technique, 0.0) + session.bench.ranks.now() - begun
        return True

    def seconds_needed(self) -> float:
        """Return the seconds of a turn for the next question, or infinity if no trial can answer an open question.

        Rows of techniques that no trial can decide get the reason.
        """
        session, worth = self.session, self._worth()
        for technique in self.open:
            if technique not in worth and not self._tried.get(technique):
                session.tuner.decide(technique)
        if not worth:
            return math.inf
        factors, best = self._factors(worth), max(worth, key=self._rate)
        seconds = self._cost(*factors[:2]) if len(factors) > 1 and best in factors else self._cost(best)
        return ROOM * max(seconds / (1 - RACE_SHARE), seconds + shortest_race(session.bench))

    def plan(self) -> Plan:
        """Return the decisions so far. Another start continues with the open techniques."""
        plan = self.session.plan()
        undecided = {*plan.undecided, *(technique.name for technique in self.open)}
        decisions = {**self.answers, **plan.decisions}
        return replace(plan, decisions=decisions, undecided=[t.name for t in REGISTRY if t.name in undecided])

    # Questions

    def _next(self) -> Sequence[Any]:
        """Return the techniques of the next question; empty if no question can be answered in the time that is left.

        Untried techniques that can be combined are one question.
        """
        session, budget = self.session, self.session.bench.budget
        chosen = [technique for technique in self.open if session.choices.of(technique) is not None]
        worth = self._worth()
        ready = [technique for technique in worth if self._cost(technique) <= session.tuner.seconds_left(technique)]
        usual = {t: max(self._cost(t), TRIAL_SECONDS) for t in ready if t not in self._tried}
        factors = self._factors(ready)
        if sum(usual.values()) <= budget.left or not ready:
            untried = [t for t in self.open if t in chosen or t in usual]
            question = factors if len(factors) > 1 else untried[:1]
        else:
            question = chosen[:1]
        if not question and ready:
            best = max(ready, key=self._rate)
            question = factors if len(factors) > 1 and best in factors else [best]
        while len(question) > 1 and not budget.fits(self._cost(*question)):
            question = question[:-1]
        budget.later = sum(seconds for technique, seconds in usual.items() if technique not in question)
        return question

    def _worth(self) -> list[Measured]:
        """Return the open techniques that a trial with enough time may decide.

        A technique that was tried for ``TRIAL_SECONDS`` is tried again only if it looks faster.
        """
        session = self.session
        if not session.measures:
            return []
        least = least_saving(session.bench.known_noise) * session.bench.pace.total_ms
        worth = [t for t in self.open if self._tried.get(t, 0.0) < TRIAL_SECONDS or self._promise(t) >= least]
        return [technique for technique in worth if session.tuner.may_try(technique)]

    def _factors(self, techniques: Iterable[Measured]) -> list[StepTechnique]:
        """Return the untried techniques that can be combined, the most promising first."""
        job = self.session.job
        factors = [
            t for t in techniques if isinstance(t, StepTechnique) and t.may_combine(job) and t not in self._tried
        ]
        return sorted(factors, key=lambda technique: -technique.optimistic_gain)

    def _rate(self, technique: Measured) -> float:
        """Return the saving that a technique promises per second of its trial."""
        return self._promise(technique) / self._cost(technique)

    def _promise(self, technique: Measured) -> float:
        """Return the milliseconds per step that an earlier trial saved. Without one, return the most it may save."""
        bench = self.session.bench
        gains = {row.technique: row.gain for row in bench.ledger.rows}
        if technique in self._tried and (gain := gains.get(technique.name)) is not None:
            return bench.pace.total_ms * (1 - 1 / gain.ratio)
        return bench.ranks.largest([technique.most_saved(bench.job, bench.pace)])[0]

    def _cost(self, *techniques: Measured) -> float:
        """Return the estimated seconds of a trial of techniques, or of their check for a cached plan.

        The estimate is at least the time of all earlier trials of the technique, which decided nothing.
        """
        if techniques[0].name in self.answers:
            return WARM_COMPILE_SECONDS
        if len(techniques) > 1:
            return screening_seconds(self.session.bench, len(techniques))
        return max(self.session.tuner.shortest_trial(techniques[0]), self._tried.get(techniques[0], 0.0))

    def _ask(self, question: Sequence[Any]) -> None:
        """Answer a question. It stays open if a first or a short trial has decided nothing."""
        session, ranks = self.session, self.session.bench.ranks
        begun, first = ranks.now(), question[0]
        if len(question) > 1:
            with session.stage("trying combinations of techniques"):
                combinations = Combinations(session.bench, question)
                combinations.screen()
                combinations.decide()
        elif first.name in self.answers:
            self._check_answer(first)
        else:
            with session.stage(f"trying {first.title}{' again' if first in self._tried else ''}"):
                session.tuner.decide(first)
        took, ledger = ranks.now() - begun, session.ledger
        tried = {row.technique for row in ledger.rows if row.trials}
        for technique in question:
            was_tried = technique in self._tried
            if technique.name in tried or len(question) == 1:
                self._tried[technique] = self._tried.get(technique, 0.0) + took
                is_open = technique.name in ledger.undecided and technique.name in tried
                if not is_open or (was_tried and took > TRIAL_SECONDS):
                    self.open.remove(technique)
            else:
                self._tried[technique] = 0.0  # next time alone

    # Answers of a cached plan

    def _repeat(self, plan: Plan) -> bool:
        """Apply a plan and race it against the original loop.

        The decisions that need a setup wait for a later turn if the training is a script's.

        Returns:
            False if the plan fails or loses. Then all decisions are as before.
        """
        session, bench = self.session, self.session.bench
        before, source = session.ledger.decisions, session.job.data.source
        later: dict[str, Any] = {}
        try:
            with bench.ranks.attempt():
                self._measure_baseline(is_brief=True)
                if not session.measures:  # the training is too short to compare anything
                    _roll_back(session, before, source)
                    return False
                if session.job.spec.is_recorded:
                    later = {
                        t.name: plan.decisions[t.name]
                        for t in self.open
                        if t.name in plan.decisions and t.setup_estimate(session.job, bench.pace)
                    }
                with session.stage("checking the cached plan"):
                    session.repeated = plan
                    _apply(session, plan.without(*later))
                    self.result = _race(bench)
            gain = self.result.gain
            failure = "the tuned loop was slower than the original" if gain is not None and gain.high < 1.0 else ""
        except Exception as error:  # a candidate may no longer work
            failure = formatting.first_line(error)
        if failure:
            session.notes.append(f"{SOURCE} failed ({failure}), so trials decided again")
            log(session.notes[-1], session.logs)
            self.result = None
            _roll_back(session, before, source)
            return False
        session.notes.append(
            f"the decisions come from {SOURCE} of an earlier start. optimize(plan=None) measures all techniques again"
        )
        self._raced, self.answers = session.ledger.won, later
        self.open = [t for t in self.open if t.name in later or self._is_open_after(plan, t)]
        if self.open:
            session.repeated, session.retried = None, frozenset(plan.undecided)
        return True

    def _is_open_after(self, plan: Plan, technique: Measured) -> bool:
        """Return True if a start spends time on a technique although the plan holds.

        The plan's undecided techniques are tried again, each once. If the plan was made under load and the machine is
        quiet now, all techniques that the plan does not keep are tried.
        """
        session = self.session
        if session.job.spec.deterministic or session.choices.of(technique) is not None:
            return False
        is_quiet = session.load_average is not None and session.load_average <= session.cores
        tries_all = plan.is_made_under_load and is_quiet
        return technique.name not in plan.decisions and (tries_all or technique.name in plan.undecided)

    def _check_answer(self, technique: Measured) -> None:
        """Keep a technique as the cached plan decided, after a new comparison of its numerics."""
        session = self.session
        try:
            with session.stage(f"repeating {technique.title}"):
                keep(session, technique, self.answers.pop(technique.name))
        except NotApplicable as reason:
            session.ledger.add(Decision(technique.row("not applicable", str(reason))))
        except Exception as error:  # of a candidate that no longer works
            session.ledger.add(Decision(technique.row("rejected", formatting.first_line(error))))
        session.bench.rewind()

    # Measurements of whole loops

    def _measure_baseline(self, *, is_brief: bool) -> None:
        """Apply the requested batch size, settle the budget, and measure the original loop.

        Args:
            is_brief: leave out the costs of steps and of the loader.
        """
        session, bench, spec = self.session, self.session.bench, self.session.job.spec
        on_gpu = spec.device.type == "cuda"
        checks = not session.first_step_fits or spec.memory_limit is not None or (session.measures and on_gpu)
        checks = checks and not session.job.objective.why_untried
        with session.stage("applying the batch size"):
            session.tuner.apply_batch_size(checks_memory=checks)
        with session.stage("measuring the original loop"):
            session.settle_budget()
            if session.measures:
                session.progress.budget = bench.budget
                bench.budget.reserve(shortest_race(bench))
            self._peak = self._peak_of_device()
            self._costs = costs_of(bench) if session.measures and not is_brief else {}

    def outcome(self) -> Outcome:
        """Return the result of the last race, with the costs and the utilization of both loops."""
        session, bench, job = self.session, self.session.bench, self.session.job
        result = self.result or Outcome(bench.pace, bench.pace)
        peak = self._peak_of_device()
        before = _completed(result.before, job, self._peak, self._costs)
        after = _completed(result.after, job, peak, costs_of(bench) if session.measures else {})
        verdict = ""
        if after is not None:
            verdict = str(judged(job, after.mfu, session.rows, bench.tensor_cores, stall_fraction=after.load_fraction))
        verdict = bench.ranks.first(verdict)
        return replace(result, before=before, after=after, verdict=verdict, peak_flops=peak)

    def end(self) -> Outcome:
        """End all trials, and collect advice. Return the outcome of the last race."""
        session, bench, outcome = self.session, self.session.bench, self.outcome()
        for technique in REGISTRY:
            if isinstance(technique, Advice):
                with session.stage(f"looking at {technique.title}"):
                    session.ledger.add(Decision(_advise(technique, session, outcome.after)))
        refresh(bench)
        session.job.data.batches = ()
        for candidate in session.ledger.candidates:
            candidate.on_tuning_end()
        bench.rewind(to_train=False)
        session.end_tuning(outcome.gain)
        return outcome

    def _peak_of_device(self) -> float | None:
        """Return the peak of this rank's device in FLOP/s, which MFU refers to; None if unknown.

        A measurement has to fit into the budget. Only rank 0 measures the peak of a CPU, because the ranks would
        disturb each other.
        """
        job, ranks = self.session.job, self.session.bench.ranks
        left = self.session.bench.budget.left
        has_own = ranks.rank == 0 or job.spec.device.type == "cuda"
        own = peak_of(job.spec, job.work, seconds=left if ranks.rank == 0 else 0.0).flops if has_own else None
        of_first = ranks.first(own)
        return of_first if own is None else own


def noise_and_load(bench: Bench) -> str:
    """Return the noise of steps and the load of the machine, for the report."""
    facts = [] if bench.known_noise is None else [f"noise here is ±{formatting.share(1.96 * bench.known_noise)}"]
    load = load_average()
    facts += [] if load is None else [f"the load is {load:.1f} on {usable_cores()} cores"]
    return ", ".join(facts) or "the noise here is unknown"


def _advise(technique: Advice, session: Session, pace: Pace | None) -> Row:
    """Return the row of an advice, which may take a share of the budget."""
    row, ranks = technique.row("not tried", ""), session.job.spec.ranks
    if session.choices.of(technique) is False:
        return replace(row, why="techniques= does without it")
    try:
        with applies_on_all(ranks):
            technique.check(session.job)
        if pace is None or not session.measures:
            return replace(row, why="nothing is evaluated without a budget or with a plan")
        with ranks.attempt():
            row = _found(technique, session, pace)
        return ranks.first(row)
    except NotApplicable as reason:
        return replace(row, status="not applicable", why=str(reason))
    except Exception as error:  # the user's code may fail, because training has not run this part yet
        return replace(row, status="not applicable", why=f"looking failed with {formatting.first_line(error)}")


def _found(technique: Advice, session: Session, pace: Pace) -> Row:
    """Return the row of an advice that applies, as this rank finds it."""
    row = technique.row("advice", "")
    try:
        found = technique.findings(session.job, pace, SHARE * session.bench.budget.seconds)
    except NotApplicable as reason:
        return replace(row, status="not applicable", why=str(reason))
    stages = tuple(each for each in found if isinstance(each, Stage))
    why = in_words(stages) if stages else "\n".join(map(str, found))
    return replace(row, why=why, stages=stages)


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


def _race(bench: Bench) -> Outcome:
    """Race the tuned loop against the original for a short time, within the budget."""
    own = bench.budget
    bench.budget = Budget(min(RACE_SECONDS, own.seconds), bench.ranks)
    try:
        return race_once(bench, fewest=FEWEST_PAIRS)
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

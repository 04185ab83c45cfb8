"""Tuning of one module of a script, in turns between the script's updates."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flatout.arguments import validate
from flatout.autotune.allowance import FIRST_SECONDS, Options
from flatout.autotune.loaders import Drawn
from flatout.autotune.recorder import RecordedStep, linearized_loss
from flatout.core import formatting
from flatout.core.held import held, hold, release
from flatout.data import is_rewindable
from flatout.data.loader_class import is_plain
from flatout.optimize import summary_of
from flatout.plan import CACHED, Plan
from flatout.report import Report
from flatout.report.model import Summary
from flatout.techniques import REGISTRY, Measured, NotApplicable, StepTechnique
from flatout.training.attachments import Attachment, attach
from flatout.tuning.agenda import Baseline, Outcome, conclude, keep, measured_baseline, outcome_of, repeat
from flatout.tuning.bench import TRIAL_SECONDS
from flatout.tuning.budget import RACE_SHARE, Budget
from flatout.tuning.combinations import FEWEST_COMBINATIONS, decide_factors
from flatout.tuning.ledger import Decision
from flatout.tuning.plan_cache import forget_decision, key_of, read_plan, write_plan
from flatout.tuning.race import RaceResult, race, shortest_race
from flatout.tuning.request import Request
from flatout.tuning.session import Session

FIRST_UPDATES = 12
"""Estimated cost of a first turn in updates. The turn runs a first step and measures FLOPs, pace and noise."""

SCREENING_UPDATES, LONG_SCREENING_UPDATES = 16, 3
"""Estimated cost, in usual and in long updates, of screening one candidate and checking its numerics."""

BASELINE_UPDATES, LONG_BASELINE_UPDATES = 10, 2
"""Estimated cost, in usual and in long updates, of the numerics without candidates. A turn needs them once."""

WARM_COMPILE_SECONDS = 8.0
"""Estimated seconds of a compilation whose code is in torch's cache, with the first step."""

EXPECTED_STEPS = 10**9
"""Number of training steps for break-even decisions, practically unlimited because ``Allowance`` limits tuning."""

ROOM = 1.1
"""Time of a turn relative to its estimate, as a safety margin."""


class ModuleTuning:
    """Tuning of one module, on recorded calls. ``turn`` may be called after any update of the optimizer.

    Between two turns the script trains with the techniques that are kept so far.

    Args:
        module: the module.
        optimizer: optimizer of the module. The tuning ends when the script drops this optimizer.
        is_stepped: False if flatout cannot step the optimizer, or if another tuning does so.
        updates: for each recorded update the batches of the module, as ``batch_of`` returns them.
        options: options of the tuning.
        update_seconds: seconds of an update of the script.
        drawn: the loader of the updates, or None if it is unknown or another tuning has it.
        serve: called with this loader and the loader that replaces it.

    Attributes:
        name: the class name of the module.
        needs: seconds that the next turn needs, or infinity if no turn is left.
        spent: seconds of all turns so far.
        outcome: result of the last race, or None before the first race.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        is_stepped: bool,
        updates: Sequence[Sequence[dict[str, Any]]],
        options: Options,
        update_seconds: float,
        drawn: Drawn | None,
        serve: Callable[[DataLoader[Any], Iterable[Any]], object],
    ) -> None:
        self.name = type(module).__name__
        self._module = weakref.ref(module)
        self.needs = _first_turn_seconds(update_seconds)
        self.spent = 0.0
        self.outcome: Outcome | None = None
        self._options = options
        self._serve = serve
        loader, compute_loss, accumulate = _training_of(updates, drawn)
        request = Request(
            model=module,
            loader=loader,
            optimizer=optimizer if is_stepped else None,
            compute_loss=compute_loss,
            device=next(module.parameters()).device,
            precision=options.precision,
            accumulate=accumulate if is_stepped else 1,
            deterministic=options.deterministic,
            techniques=options.techniques,
            expected_steps=EXPECTED_STEPS,
            budget=self.needs,
            plan=options.plan,
            is_recorded=True,
        )
        session = Session(request, validate(request))
        self._optimizer, self._name = weakref.ref(optimizer), f"_flatout_session_{id(session)}"
        hold(optimizer, self._name, session)
        self._breaks = session.job.breaks
        self._summary: Summary | None = None
        self._baseline: Baseline | None = None
        self._result: RaceResult | None = None
        self._key: dict[str, str] = {}
        self._cached: dict[str, Any] = {}
        """Decisions of a cached plan that are not repeated yet."""
        self._open: list[Measured] = []
        """Techniques without a decision."""
        self._tried: dict[Measured, float] = {}
        """Techniques that were tried, with the total seconds of their trials."""

    @property
    def module(self) -> nn.Module | None:
        """The module, or None if the script has dropped it."""
        return self._module()

    @property
    def is_done(self) -> bool:
        """True if no turn is left, or if the script has dropped the optimizer."""
        return self.needs == math.inf or self._held is None

    def expect(self, update_seconds: float) -> None:
        """Estimate what a first turn needs, from the seconds of an update. Do nothing after the first turn."""
        if self._baseline is None and not self.is_done:
            self.needs = _first_turn_seconds(update_seconds)

    def turn(self, seconds: float) -> None:
        """Tune the undecided techniques for some seconds.

        After the call, the state of the training is as before, and kept techniques are on.

        Args:
            seconds: time limit for trials. A trial that has begun may take longer.

        Raises:
            BaseException: the error of a trial. All changes of the tuning are undone.
        """
        session, budget = self._session, Budget(seconds)
        try:
            if self._baseline is None:
                self._begin(budget)
            else:
                session.resume(budget)
                for rule in session.ledger.rules.values():  # a dry run has turned the rules off
                    rule.enable()
            self._go_on()
            session.pause()
            toggles = (*session.ledger.rules.values(), *session.ledger.candidates)
            attach(session.job.spec.model, Attachment(toggles, lambda: self.report))
            if self._options.is_dry:
                for toggle in reversed(toggles):
                    toggle.disable()
            elif isinstance(session.loader, DataLoader):
                self._serve(session.loader, session.job.data.source)
            if session.measures:
                write_plan(self._key, self._plan())
        except BaseException as error:
            session.restore(error)
            session.close()
            if isinstance(session.loader, DataLoader):
                self._serve(session.loader, session.loader)
            self.drop()
            raise
        finally:
            self.spent += budget.spent
        self._summary = self._summarized(session)
        if self.is_done:
            self.end()

    def drop(self) -> None:
        """End the tuning without a report."""
        self._summary = None
        self.end()

    def end(self) -> None:
        """End the tuning, and release the module and its recorded calls. Kept techniques stay on."""
        self.needs = math.inf
        if (optimizer := self._optimizer()) is not None:
            release(optimizer, self._name)

    @property
    def _held(self) -> Session | None:
        """Session of the tuning, or None after the tuning. The optimizer holds the session, which refers to both."""
        optimizer = self._optimizer()
        return None if optimizer is None else held(optimizer, self._name)

    @property
    def _session(self) -> Session:
        session = self._held
        assert session is not None
        return session

    @property
    def report(self) -> Report | None:
        """Report of the decisions so far, or None before the first turn and if tuning has failed."""
        return None if self._summary is None else Report(self._summary.reverted(self._breaks.found))

    def _summarized(self, session: Session) -> Summary:
        """Return the summary of the decisions so far, with a row for each technique."""
        ledger, outcome = session.ledger, self.outcome or Outcome(None, None, None, "wall", "", None)
        before, decided = ledger.decisions, {row.technique for row in ledger.rows}
        for technique in self._open:
            if technique.name not in decided:
                ledger.add(Decision(technique.row("not tried", "the script ended before tuning came to it")))
        try:
            return summary_of(session, outcome, self.spent)
        finally:
            ledger.reset(before)  # a later turn may try these techniques

    def _plan(self) -> Plan:
        """Return the decisions so far. The next start of the script continues with the open techniques."""
        plan = self._session.plan()
        undecided = {*plan.undecided, *(technique.name for technique in self._open)}
        decisions = {**self._cached, **plan.decisions}
        return replace(plan, decisions=decisions, undecided=[t.name for t in REGISTRY if t.name in undecided])

    def _begin(self, budget: Budget) -> None:
        """Prepare the session, and repeat a cached plan. Without a plan, measure the original loop."""
        session, techniques = self._session, [t for t in REGISTRY if isinstance(t, Measured)]
        session.prepare()
        self._key = key_of(session)
        self._breaks.forget = partial(forget_decision, self._key)
        session.bench.budget = budget
        self._open = [t for t in techniques if session.choices.of(t) is None]
        plan = read_plan(self._key) if self._options.plan == CACHED else None
        if plan is not None and self._repeat(plan):
            return
        self._baseline = measured_baseline(session, is_brief=True)
        for technique in techniques:
            if technique not in self._open:
                session.tuner.decide(technique)

    def _repeat(self, plan: Plan) -> bool:
        """Repeat the decisions of a cached plan that need no setup. Return False if the plan is not valid here."""
        session = self._session
        later = {
            technique.name: plan.decisions[technique.name]
            for technique in self._open
            if technique.name in plan.decisions and technique.setup_estimate(session.job, session.bench.pace)
        }
        at_once = {name: value for name, value in plan.decisions.items() if name not in later}
        repeated = repeat(session, replace(plan, decisions=at_once))
        session.repeated = None
        if repeated is None:
            return False
        self._baseline, self._result = repeated
        session.retried, self._cached = frozenset(plan.undecided), later
        self._open = [t for t in self._open if t.name in plan.undecided or t.name in later]
        return True

    def _go_on(self) -> None:
        """Decide open techniques while there is time, race the kept ones, and estimate the next turn."""
        session, bench, won = self._session, self._session.bench, self._session.ledger.won
        assert self._baseline is not None
        bench.budget.reserve(shortest_race(bench))
        self._try(self._worth_trying())
        is_new = session.ledger.won != won
        if is_new:
            self._result = self._race()
        result = self._result or RaceResult(bench.pace, bench.pace)
        worth = self._worth_trying()
        with self._unlimited():
            for technique in self._open:
                if technique not in worth:
                    session.tuner.decide(technique)  # the technique's row gives the reason why it is not tried
        self.needs = self._needed(worth)
        if self.is_done:
            self.outcome = conclude(session, self._baseline, result)
        elif is_new or self.outcome is None:
            self.outcome = outcome_of(session, self._baseline, result)

    def _race(self) -> RaceResult:
        """Race the kept techniques against the original. Techniques that the race reverts are open again."""
        ledger, begun = self._session.ledger, time.perf_counter()
        won = {decision.technique for decision in ledger.won}
        result = race(self._session.bench)
        reverted = won - {decision.technique for decision in ledger.won}
        for technique in [t for t in REGISTRY if isinstance(t, Measured) and t.name in reverted]:
            self._open.append(technique)
            self._add_to_tried(technique, begun)
        return result

    def _worth_trying(self) -> list[Measured]:
        """Return the open techniques that a trial with enough time may decide."""
        with self._unlimited():
            return [technique for technique in self._open if self._session.tuner.may_try(technique)]

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        """Remove the budget's limit inside the block, because later turns have more time than this one."""
        bench = self._session.bench
        own, bench.budget = bench.budget, Budget(math.inf)
        try:
            yield
        finally:
            bench.budget = own

    def _try(self, worth: Sequence[Measured]) -> None:
        """Try techniques while there is time. The most promising technique is the first.

        Untried techniques that can be combined are tried together.
        """
        bench = self._session.bench
        first = self._next(worth) if worth else None
        tried: set[str] = set()
        for technique in sorted(worth, key=lambda technique: technique is not first):
            factors = self._factors(worth)
            while len(factors) > 1 and not bench.budget.fits(self._screening_seconds(len(factors))):
                factors.pop()
            if technique in factors and len(factors) > 1:
                tried |= self._try_together(factors)
            if technique.name not in tried and bench.budget.fits(self._estimate(technique)):
                self._try_alone(technique)

    def _try_together(self, factors: Sequence[StepTechnique]) -> set[str]:
        """Try combinations of techniques, and return the names of the tried ones."""
        session, begun = self._session, time.perf_counter()
        tried = decide_factors(session.tuner, session.bench, factors)
        for technique in factors:
            if technique.name in tried:
                self._note_trial(technique, begun)
        return tried

    def _try_alone(self, technique: Measured) -> None:
        session, begun = self._session, time.perf_counter()
        if technique.name in self._cached:
            self._keep_cached(technique)
        else:
            with session.stage(f"trying {technique.title}"):
                session.tuner.decide(technique)
        self._note_trial(technique, begun)

    def _note_trial(self, technique: Measured, begun: float) -> None:
        """Record that a technique was tried. A technique stays open if a first or a short trial has decided nothing."""
        was_tried, took = technique in self._tried, self._add_to_tried(technique, begun)
        if technique.name not in self._session.ledger.undecided or (was_tried and took > TRIAL_SECONDS):
            self._open.remove(technique)

    def _add_to_tried(self, technique: Measured, begun: float) -> float:
        took = time.perf_counter() - begun
        self._tried[technique] = self._tried.get(technique, 0.0) + took
        return took

    def _keep_cached(self, technique: Measured) -> None:
        """Keep a technique as the cached plan decided, after a new comparison of its numerics."""
        session = self._session
        try:
            with session.stage(f"repeating {technique.title}"):
                keep(session, technique, self._cached.pop(technique.name))
        except NotApplicable as reason:
            session.ledger.add(Decision(technique.row("not applicable", str(reason))))
        except Exception as error:  # of a candidate that no longer works
            session.ledger.add(Decision(technique.row("rejected", formatting.first_line(error))))
        session.bench.rewind()

    def _factors(self, worth: Sequence[Measured]) -> list[StepTechnique]:
        """Return the untried techniques that can be combined, the most promising first."""
        job = self._session.job
        factors = [t for t in worth if isinstance(t, StepTechnique) and t.may_combine(job) and t not in self._tried]
        return sorted(factors, key=lambda technique: -technique.optimistic_gain)

    def _needed(self, worth: Sequence[Measured]) -> float:
        """Return the seconds of a turn for the next technique, or infinity if there is none."""
        if not worth:
            return math.inf
        technique, factors = self._next(worth), self._factors(worth)
        is_factor = technique in factors and len(factors) > 1
        seconds = self._screening_seconds(2) if is_factor else self._estimate(technique)
        return ROOM * max(seconds / (1 - RACE_SHARE), seconds + shortest_race(self._session.bench))

    def _next(self, worth: Sequence[Measured]) -> Measured:
        """Return the technique with the largest expected saving per second of its trial."""
        return max(worth, key=lambda technique: self._promise(technique) / self._estimate(technique))

    def _promise(self, technique: Measured) -> float:
        """Return the milliseconds per step that an earlier trial saved. Without one, return the most it may save."""
        session, pace = self._session, self._session.bench.pace
        if technique in self._tried and (gain := session.ledger.row(technique.name).gain) is not None:
            return pace.total_ms * (1 - 1 / gain.ratio)
        return technique.most_saved(session.job, pace)

    def _estimate(self, technique: Measured) -> float:
        """Return the estimated seconds of a trial that may decide a technique, or of its repetition from a plan.

        The estimate is at least the time of all earlier trials of the technique, which decided nothing.
        """
        if technique.name in self._cached:
            return WARM_COMPILE_SECONDS
        session = self._session
        seconds = max(session.tuner.shortest_trial(technique), self._tried.get(technique, 0.0))
        if isinstance(technique, StepTechnique):
            setup = technique.setup_estimate(session.job, session.bench.pace)
            seconds = max(seconds, setup + self._screening_seconds(1))
        return seconds

    def _screening_seconds(self, factors: int) -> float:
        """Return the estimated seconds to screen ``factors`` techniques, with the fewest pairs of blocks."""
        bench = self._session.bench
        each = LONG_SCREENING_UPDATES if bench.is_long else SCREENING_UPDATES
        once = LONG_BASELINE_UPDATES if bench.is_long else BASELINE_UPDATES
        return (once + factors * each) * bench.update_seconds + FEWEST_COMBINATIONS * 2 * bench.block_seconds


def _first_turn_seconds(update_seconds: float) -> float:
    return max(FIRST_SECONDS, FIRST_UPDATES * update_seconds)


def _training_of(
    updates: Sequence[Sequence[dict[str, Any]]], drawn: Drawn | None
) -> tuple[Iterable[Any], Callable[[nn.Module, Any], Tensor], int]:
    """Return loader, ``compute_loss`` and batches per update of recorded updates.

    Trials take batches from the script's loader if that is safe. Otherwise the recorded batches are the loader.
    """
    loader = None if drawn is None else drawn.loader()
    if drawn is not None and loader is not None and _may_be_tried(loader) and len(updates[0]) % drawn.batches == 0:
        per_batch = len(updates[0]) // drawn.batches
        steps = [update[i : i + per_batch] for update in updates for i in range(0, len(update), per_batch)]
        return loader, RecordedStep(steps), drawn.batches
    return [batch for update in updates for batch in update], linearized_loss, len(updates[0])


def _may_be_tried(loader: DataLoader[Any]) -> bool:
    """Return True if trials may iterate a script's loader.

    A loader class of the script may change batches. A dataset that only workers read may open a file at the first read,
    so this process must not read it.
    """
    return is_plain(loader) and is_rewindable(loader) and loader.num_workers == 0

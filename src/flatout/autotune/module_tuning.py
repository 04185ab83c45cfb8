"""Tuning of one module of a script, in turns between the script's updates."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flatout.autotune.loaders import Drawn
from flatout.autotune.recorder import RecordedStep, linearized_loss
from flatout.autotune.script_ranks import Replica
from flatout.core.held import held, hold, release
from flatout.data import is_rewindable
from flatout.data.loader_class import is_plain
from flatout.distributed.agreement import ALONE
from flatout.optimize import summary_of
from flatout.plan import Plan
from flatout.report import Report
from flatout.report.model import Summary
from flatout.training.attachments import Attachment, attach
from flatout.training.spec import CACHED, Spec
from flatout.tuning.agenda import Agenda
from flatout.tuning.arguments import BUDGET_VARIABLE, check, choices_of, resolved
from flatout.tuning.budget import FIRST_SECONDS, Budget
from flatout.tuning.ledger import Decision
from flatout.tuning.plan_cache import forget_decision, key_of, read_plan, write_plan
from flatout.tuning.race import Outcome
from flatout.tuning.ranks import world_size
from flatout.tuning.session import Session
from flatout.tuning.statistics import FEWEST_PAIRS

FIRST_UPDATES = 4 * FEWEST_PAIRS
"""Estimated cost of a first turn, in updates: pairs of the noise floor, and as many for first step, FLOPs and pace."""

EXPECTED_STEPS = 10**9
"""Number of training steps for break-even decisions, practically unlimited because ``Allowance`` limits tuning."""


@dataclass(frozen=True)
class Options:
    """Arguments of ``flatout.optimize`` that also apply to a script, and ``is_dry``.

    Attributes:
        techniques: as in ``flatout.optimize``.
        precision: as in ``flatout.optimize``.
        deterministic: as in ``flatout.optimize``, but without setting torch's own flags.
        plan: as in ``flatout.optimize``.
        is_dry: True to measure without keeping any technique.
        budget: limit in seconds of all tuning, or None for the share of :class:`Allowance` alone.
        tunes_ranks: False to tune no training of several ranks.

    Raises:
        TypeError: ``techniques`` is not a mapping.
        ValueError: a technique or a precision is unknown, or two choices contradict each other.
    """

    techniques: Mapping[str, Any] = field(default_factory=dict)
    precision: str | torch.dtype = "auto"
    deterministic: bool = False
    plan: Plan | str | Path | None = CACHED
    is_dry: bool = False
    budget: float | None = None
    tunes_ranks: bool = True

    def __post_init__(self) -> None:
        choices_of(self.techniques, self.precision)

    @property
    def why_nothing(self) -> str:
        """Reason why nothing is tuned in this process. Empty if tuning may begin."""
        if self.budget == 0:
            return f"nothing is tuned: {BUDGET_VARIABLE}=0 allows no trial"
        if not self.tunes_ranks and world_size() > 1:
            return "nothing is tuned on several ranks: flatout run can tune them"
        return ""


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
        replica: the module on one of several ranks, which all make the same calls, or None for a single process.

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
        replica: Replica | None = None,
    ) -> None:
        self.name = type(module).__name__
        self._module = weakref.ref(module)
        self._ranks = ALONE if replica is None else replica.ranks
        self.needs = self._ranks.first(_first_turn_seconds(update_seconds))
        self.spent = 0.0
        self.outcome: Outcome | None = None
        self._options = options
        self._serve = serve
        loader, compute_loss, accumulate = _training_of(updates, drawn)
        spec = Spec(
            model=module,
            loader=loader,
            optimizer=optimizer if is_stepped else None,
            compute_loss=compute_loss if replica is None else replica.loss,
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
        choices = check(spec)
        session = Session(resolved(spec, choices, self._ranks), choices)
        if replica is not None:
            session.job.stepper.times.begin(replica.ranks, spec.device)
            session.job.stepper.sync, session.job.objective.plain = replica.sync, replica.sync.alone
        self._optimizer, self._name = weakref.ref(optimizer), f"_flatout_agenda_{id(session)}"
        hold(optimizer, self._name, Agenda(session))
        self._breaks = session.job.breaks
        self._summary: Summary | None = None
        self._key: dict[str, str] = {}

    @property
    def module(self) -> nn.Module | None:
        """The module, or None if the script has dropped it."""
        return self._module()

    @property
    def is_done(self) -> bool:
        """True if no turn is left, or if the script has dropped the optimizer."""
        return self.needs == math.inf or self._held is None

    def expect(self, update_seconds: float) -> None:
        """Estimate what a first turn needs, from the seconds of an update. Do nothing after the first turn.

        On several ranks, only the estimate of rank 0 counts.
        """
        if not self._key and not self.is_done:
            self.needs = _first_turn_seconds(update_seconds)

    def turn(self, seconds: float) -> None:
        """Tune the undecided techniques for some seconds.

        After the call, the state of the training is as before, and kept techniques are on. All ranks of the training
        must call this together.

        Args:
            seconds: time limit for trials, equal on all ranks. A trial that has begun may take longer.

        Raises:
            BaseException: the error of a trial. All changes of the tuning are undone.
        """
        agenda, budget = self._agenda, Budget(seconds, self._ranks)
        session = agenda.session
        try:
            if not self._key:
                self._begin(agenda, budget)
            else:
                session.resume(budget)
                for rule in session.ledger.rules.values():  # a dry run has turned the rules off
                    rule.enable()
            self._answer(agenda)
            session.pause()
            toggles = (*session.ledger.rules.values(), *session.ledger.candidates)
            attach(session.job.spec.model, Attachment(toggles, lambda: self.report))
            if self._options.is_dry:
                for toggle in reversed(toggles):
                    toggle.disable()
            elif isinstance(session.loader, DataLoader):
                self._serve(session.loader, session.job.data.source)
            if session.measures and self._ranks.rank == 0:
                write_plan(self._key, agenda.plan())
        except BaseException as error:
            session.restore(error)
            session.close()
            if isinstance(session.loader, DataLoader):
                self._serve(session.loader, session.loader)
            self.drop()
            raise
        finally:
            self.spent += budget.shown
        self._summary = self._summarized(agenda)
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
    def _held(self) -> Agenda | None:
        """Agenda, or None after the tuning. The optimizer holds the agenda, whose session refers to both."""
        optimizer = self._optimizer()
        return None if optimizer is None else held(optimizer, self._name)

    @property
    def _agenda(self) -> Agenda:
        agenda = self._held
        assert agenda is not None
        return agenda

    @property
    def report(self) -> Report | None:
        """Report of the decisions so far, or None before the first turn and if tuning has failed."""
        return None if self._summary is None else Report(self._summary.reverted(self._breaks.found))

    def _summarized(self, agenda: Agenda) -> Summary:
        """Return the summary of the decisions so far, with a row for each technique."""
        ledger = agenda.session.ledger
        before, decided = ledger.decisions, {row.technique for row in ledger.rows}
        for technique in agenda.open:
            if technique.name not in decided:
                ledger.add(Decision(technique.row("not tried", "the training ended first")))
        try:
            return summary_of(agenda.session, self.outcome or Outcome(), self.spent)
        finally:
            ledger.reset(before)  # a later turn may try these techniques

    def _begin(self, agenda: Agenda, budget: Budget) -> None:
        """Prepare the session, and check a cached plan. Without a plan, measure the original loop."""
        session = agenda.session
        session.prepare()
        self._key = key_of(session)
        is_first = self._ranks.rank == 0
        if is_first:
            self._breaks.forget = partial(forget_decision, self._key)
        session.bench.budget = budget
        agenda.begin(self._ranks.first(read_plan(self._key) if self._options.plan == CACHED and is_first else None))

    def _answer(self, agenda: Agenda) -> None:
        """Answer open questions while there is time, race the kept techniques, and estimate the next turn."""
        agenda.answer()
        is_new = agenda.race()
        self.needs = agenda.seconds_needed()
        if self.is_done:
            self.outcome = agenda.end()
        elif is_new or self.outcome is None:
            self.outcome = agenda.outcome()


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

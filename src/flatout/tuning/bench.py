"""The bench that trials run on: a job, its starting state, and the candidates that are on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flatout.core.batches import batch_size_of
from flatout.core.snapshot import Snapshot
from flatout.mfu import MfuCounter
from flatout.report.model import Pace, Row
from flatout.techniques import Candidate, RecordedCandidate
from flatout.training.job import Job
from flatout.training.stepper import PhaseOf
from flatout.tuning.budget import Budget
from flatout.tuning.ledger import Decision, Ledger
from flatout.tuning.loader_timer import LoaderTimer
from flatout.tuning.step_memory import step_memory
from flatout.tuning.trial import interleave, seconds, synchronize

TRIAL_SECONDS = 4.0
"""Longest that the pairs of one trial take; setting up comes on top."""

PHASE_UPDATES = 8
PHASE_SECONDS = 1.0
"""Updates over which the phases of a step are measured, and seconds after which no more of them begin."""

FEWEST_UPDATES = 4
"""Two for the memory of a step, two for its phases."""

COSTS_SHARE = 0.05
"""Share of the budget that these, and the race of the whole, may take whatever trials have left."""

STRETCH_SECONDS = 0.05
"""Length of the stretches of training that loaders take turns in."""

TURN_SECONDS = 0.02
"""Length of the turns that ways of stepping take, where updates are shorter."""

WARMED_UP_BELOW = 0.5
"""Seconds of an update of which one comes before each turn, untimed."""


@dataclass
class Bench:
    """Training that trials step. ``rewind`` restores its starting state before each trial.

    Attributes:
        job: the training; ``job.data.source`` changes when a loader is kept.
        state: the state that every trial begins with.
        budget: seconds for all trials.
        rewindable: True if a trial may iterate the loader without losing samples.
        ledger: the decisions so far.
    """

    job: Job
    state: Snapshot
    budget: Budget
    rewindable: bool
    ledger: Ledger = field(default_factory=Ledger)
    _pace: Pace | None = None
    _memory: int | None = None

    def rewind(self, *, to_train: bool = True) -> None:
        """Restore the training state, with exactly the kept candidates on.

        Args:
            to_train: put a model that an optimizer trains into train mode. A model from a checkpoint often comes in
                eval mode, which training would leave.
        """
        for candidate in reversed(self.ledger.candidates):
            candidate.disable()
        self.job.stepper.reset()
        self.state.restore()
        self.state.check()
        for candidate in self.ledger.candidates:
            candidate.enable()
        if to_train and self.job.spec.optimizer is not None and not self.job.spec.model.training:
            self.job.spec.model.train()

    def keep(self, decision: Decision) -> Row:
        """Record a decision to keep a technique, and leave its candidate on."""
        row = self.ledger.add(decision)
        if decision.candidate is not None:
            decision.candidate.enable()
        self.forget()
        return row

    def forget(self) -> None:
        """Forget pace and memory, because a decision changed them."""
        self._pace = self._memory = None

    def use(self, source: Iterable[Any]) -> None:
        """Train from another loader."""
        self.job.data.source = source
        self._pace = None

    def update(self, i: int, *phase: PhaseOf) -> None:
        """The steps of one update, on the batches of turn ``i``; ``phase`` as in ``Job.step``."""
        job = self.job
        for k in range(job.spec.accumulate):
            job.stepper.step(job.data.batches[(i * job.spec.accumulate + k) % len(job.data.batches)], *phase)

    def turns(self) -> Callable[[int], float]:
        """What takes turn ``i`` and returns the seconds of an update in it.

        An update comes first: turning a switch moves weights, clears what was prepared, and leaves memory as another
        way of stepping had it. Only where updates are so long that this hardly shows is that time saved.
        """
        update_seconds = self.job.spec.accumulate * self.pace.step_ms / 1e3
        count = max(1, round(TURN_SECONDS / update_seconds))

        def updates(first: int) -> None:
            for i in range(first, first + count):
                self.update(i)

        def turn(i: int) -> float:
            if update_seconds < WARMED_UP_BELOW:
                self.update(i)
            return seconds(lambda: updates(i), self.job.spec.device) / count

        return turn

    @property
    def pace(self) -> Pace:
        """How fast the job runs with what is kept so far."""
        if self._pace is None:
            self._pace = self._measure_pace()
        return self._pace

    def _measure_pace(self) -> Pace:
        job, batches = self.job, self.job.data.batches
        self.rewind()
        for batch in batches[:2]:
            job.stepper.step(batch)
        if self.rewindable:
            track = LoaderTimer(job, job.data.source)
            track.stretch(2 * len(batches), settle=1)  # workers start with the first
            track.close()
            pace = track.pace
        else:
            step = median(seconds(lambda b=b: job.stepper.step(b), job.spec.device) for b in (*batches, *batches))  # type: ignore[misc]
            pace = Pace(step_ms=1e3 * step, load_ms=0.0, samples_per_second=batch_size_of(batches[0]) / step)
        self.rewind()
        return pace

    @property
    def memory(self) -> int | None:
        """Bytes that an update allocates at its height with what is kept so far; None where it cannot be told."""
        if self._memory is None:
            self._memory = self.memory_with()
        return self._memory

    def memory_with(self, *candidates: Candidate) -> int | None:
        """Return ``memory`` with more candidates on."""
        if any(isinstance(candidate, RecordedCandidate) for candidate in (*self.ledger.candidates, *candidates)):
            return None  # replays allocate nothing
        self.rewind()
        with ExitStack() as stack:
            for candidate in candidates:
                stack.enter_context(candidate)
            try:
                return step_memory(lambda: self.update(0), self.job.spec.device)
            except RuntimeError:  # of the profiler: what runs here has run before
                return None
            finally:
                self.rewind()

    def costs(self) -> dict[str, Any]:
        """What else a ``Pace`` tells of the loop with what is kept so far; without what would take too long.

        That is ``step_bytes``, ``phases`` and, where the loader can be rewound, ``loader_per_second``.
        """
        told: dict[str, Any] = {}
        if self._affords(FEWEST_UPDATES * self.job.spec.accumulate * self.pace.step_ms):
            told |= {"step_bytes": self.memory, "phases": self.phases()}
        if self.rewindable:
            self.rewind()
            # A loader that fails here fails in training too, or has failed in its trial: not known is all it is now.
            with closing(LoaderTimer(self.job, self.job.data.source)) as track, suppress(Exception):
                if self._affords(track.fewest_alone * self.pace.total_ms):
                    told["loader_per_second"] = track.alone()
            self.rewind()
        return told

    def _affords(self, ms: float) -> bool:
        return ms / 1e3 <= max(self.budget.left, COSTS_SHARE * self.budget.seconds)

    def phases(self) -> dict[str, float]:
        """Share of an update's time that each of its phases takes with what is kept so far."""
        counter = MfuCounter(device=self.job.spec.device, phases_every=1)
        self.rewind()
        self.update(0)  # warms up
        begun = time.perf_counter()
        for i in range(1, 1 + PHASE_UPDATES):
            with counter.step() as step:
                self.update(i, step.phase)
            if time.perf_counter() - begun > PHASE_SECONDS:
                break
        synchronize(self.job.spec.device)
        phases = counter.total.phases
        self.rewind()
        if phases is None:  # on a GPU that this build has no code for
            return {}
        named = {name: getattr(phases, name) for name in ("forward", "backward", "update")}
        whole = phases.total
        return {name: seconds / whole for name, seconds in (named | {"other": whole - sum(named.values())}).items()}

    def stretch_steps(self) -> int:
        """Batches of a stretch: long enough to time, and whole updates."""
        step_seconds = self.pace.total_ms / 1e3
        return self._whole_updates(min(50, max(4, math.ceil(STRETCH_SECONDS / step_seconds))))

    def _whole_updates(self, steps: int) -> int:
        return self.job.spec.accumulate * math.ceil(steps / self.job.spec.accumulate)

    def interleave(self, old: Callable[[int], float], new: Callable[[int], float]) -> tuple[list[float], list[float]]:
        """Measure pairs for as long as a trial may take."""
        return interleave(old, new, *self.budget.deadlines(TRIAL_SECONDS))

    def alternate(
        self, old: LoaderTimer, new: LoaderTimer, on_for_new: Sequence[Candidate] = (), scale: float = 1.0
    ) -> tuple[list[float], list[float]]:
        """Train from two loaders in turns, and return the seconds of each stretch.

        Each loader first drains its queue, and continues until the other's workers have filled theirs.

        Args:
            old: the baseline.
            new: the candidate.
            on_for_new: candidates that are on exactly while ``new`` runs.
            scale: samples of a batch of ``new``, relative to one of ``old``. Times of ``old`` are multiplied by it.
        """
        steps = self.stretch_steps()

        def stretch_old(_: int) -> float:
            for candidate in reversed(on_for_new):
                candidate.disable()
            return scale * old.stretch(steps, old.queue, rest=new.refill_seconds)

        def stretch_new(_: int) -> float:
            for candidate in on_for_new:
                candidate.enable()
            return new.stretch(steps, new.queue, rest=old.refill_seconds)

        try:
            return self.interleave(stretch_old, stretch_new)
        finally:
            old.close()
            new.close()


@contextmanager
def off(*candidates: Candidate) -> Iterator[None]:
    """Turn candidates off inside the block; they were turned on in this order."""
    try:
        for candidate in reversed(candidates):
            candidate.disable()
        yield
    finally:
        for candidate in candidates:
            candidate.enable()

"""Bench for trials: a job, its starting state, and the candidates that are on."""

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
"""Time limit for the pairs of one trial, in seconds. Set-up is extra."""

PHASE_UPDATES = 8
PHASE_SECONDS = 1.0
"""Limits of the phase measurement: a number of updates, and seconds after which no further update starts."""

FEWEST_UPDATES = 4
"""Two updates for the memory of a step, and two for its phases."""

COSTS_SHARE = 0.05
"""Share of the budget that is reserved for these measurements and the race, whatever trials have left."""

STRETCH_SECONDS = 0.05
"""Duration of a stretch of training from one loader, in trials that alternate two loaders."""

TURN_SECONDS = 0.02
"""Duration of a turn with one candidate, if updates are shorter."""

WARMED_UP_BELOW = 0.5
"""Duration of an update, in seconds, below which an untimed update precedes each turn."""


@dataclass
class Bench:
    """Training that trials step. ``rewind`` restores its starting state before each trial.

    Attributes:
        job: the training. ``job.data.source`` changes when a loader is kept.
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
            to_train: set a model with an optimizer to train mode. A model from a checkpoint often arrives in eval mode,
                and training needs train mode.
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
        """Use another loader as the source of the training."""
        self.job.data.source = source
        self._pace = None

    def update(self, i: int, *phase: PhaseOf) -> None:
        """Run the steps of one update on the batches of turn ``i``, with ``phase`` as in ``Stepper.step``."""
        job = self.job
        for k in range(job.spec.accumulate):
            job.stepper.step(job.data.batches[(i * job.spec.accumulate + k) % len(job.data.batches)], *phase)

    def turns(self) -> Callable[[int], float]:
        """Return a function that runs turn ``i`` and returns the seconds per update.

        An untimed update precedes each turn, because toggling a candidate moves weights, clears caches and changes the
        state of the allocator. This update is omitted if updates are so long that its effect is negligible.
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
        """Pace of the job with the kept candidates."""
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
            track.stretch(2 * len(batches), settle=1)  # the first stretch starts the workers
            track.close()
            pace = track.pace
        else:
            step = median(seconds(lambda b=b: job.stepper.step(b), job.spec.device) for b in (*batches, *batches))  # type: ignore[misc]
            pace = Pace(step_ms=1e3 * step, load_ms=0.0, samples_per_second=batch_size_of(batches[0]) / step)
        self.rewind()
        return pace

    @property
    def memory(self) -> int | None:
        """Peak memory of an update above the resident memory, in bytes, with the kept candidates; None if unknown."""
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
            except RuntimeError:  # an error of the profiler, because the step itself has run before
                return None
            finally:
                self.rewind()

    def costs(self) -> dict[str, Any]:
        """Return more fields of a ``Pace``, with the kept candidates, except for those that would take too long.

        The fields are ``step_bytes``, ``phases`` and, if the loader can be rewound, ``loader_per_second``.
        """
        told: dict[str, Any] = {}
        if self._affords(FEWEST_UPDATES * self.job.spec.accumulate * self.pace.step_ms):
            told |= {"step_bytes": self.memory, "phases": self.phases()}
        if self.rewindable:
            self.rewind()
            # A loader that fails here fails in training too, or has failed in its trial. Here its rate is only unknown.
            with closing(LoaderTimer(self.job, self.job.data.source)) as track, suppress(Exception):
                if self._affords(track.fewest_alone * self.pace.total_ms):
                    told["loader_per_second"] = track.alone()
            self.rewind()
        return told

    def _affords(self, ms: float) -> bool:
        return ms / 1e3 <= max(self.budget.left, COSTS_SHARE * self.budget.seconds)

    def phases(self) -> dict[str, float]:
        """Return the share of each phase in an update's time, with the kept candidates."""
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
        if phases is None:  # no phases on a GPU that this build has no code for
            return {}
        named = {name: getattr(phases, name) for name in ("forward", "backward", "update")}
        whole = phases.total
        return {name: seconds / whole for name, seconds in (named | {"other": whole - sum(named.values())}).items()}

    def stretch_steps(self) -> int:
        """Return the number of batches per stretch: long enough to time, and whole updates."""
        step_seconds = self.pace.total_ms / 1e3
        return self._whole_updates(min(50, max(4, math.ceil(STRETCH_SECONDS / step_seconds))))

    def _whole_updates(self, steps: int) -> int:
        return self.job.spec.accumulate * math.ceil(steps / self.job.spec.accumulate)

    def interleave(self, old: Callable[[int], float], new: Callable[[int], float]) -> tuple[list[float], list[float]]:
        """Measure pairs within the time limit of a trial."""
        return interleave(old, new, *self.budget.deadlines(TRIAL_SECONDS))

    def alternate(
        self, old: LoaderTimer, new: LoaderTimer, on_for_new: Sequence[Candidate] = (), scale: float = 1.0
    ) -> tuple[list[float], list[float]]:
        """Train from two loaders alternately, and return the seconds of each stretch.

        Each loader first drains its queue, and continues until the other's workers have filled theirs.

        Args:
            old: the baseline.
            new: the candidate.
            on_for_new: candidates that are on only while ``new`` runs.
            scale: samples per batch of ``new``, relative to ``old``. Times of ``old`` are multiplied by it.
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
    """Turn candidates off inside the block, in reverse order."""
    try:
        for candidate in reversed(candidates):
            candidate.disable()
        yield
    finally:
        for candidate in candidates:
            candidate.enable()

"""Bench for trials: a job, its starting state, and the candidates that are on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from flatout.core.batches import batch_size_of
from flatout.core.snapshot import Snapshot
from flatout.mfu import MfuCounter
from flatout.report.model import Pace, Row
from flatout.techniques import Candidate, RecordedCandidate
from flatout.training.job import Job
from flatout.training.stepper import PhaseOf
from flatout.tuning.block import Block
from flatout.tuning.budget import Budget
from flatout.tuning.ledger import Decision, Ledger
from flatout.tuning.loader_timer import LoaderTimer
from flatout.tuning.noise import Noise
from flatout.tuning.step_memory import step_memory
from flatout.tuning.timing import seconds, synchronize, timed_block
from flatout.tuning.trial import Measure, PairedTrial

TRIAL_SECONDS = 4.0
"""Time limit for the pairs of one trial, in seconds, until all techniques were tried. Set-up is extra."""

PHASE_UPDATES = 8
PHASE_SECONDS = 1.0
"""Limits of the phase measurement: a number of updates, and seconds after which no further update starts."""

FEWEST_UPDATES = 4
"""Two updates for the memory of a step, and two for its phases."""

COSTS_SHARE = 0.05
"""Share of the budget that is reserved for these measurements and the race, whatever trials have left."""

STRETCH_SECONDS = 0.05
"""Duration of a stretch of training from one loader, in trials that alternate two loaders."""

BLOCK_SECONDS = 0.02
"""Duration of a block with one candidate, if updates are shorter."""

LONG_UPDATE = 0.5
"""Duration of an update, in seconds, up to which an untimed update precedes each block."""

NOISE_SHARE = 0.05
"""Share of the budget for the noise floor."""

LOADER_NOISE_PAIRS = 3
"""Number of pairs of training from the present loader with itself, before another loader is tried."""

FEWEST_NOISE_PAIRS, MOST_NOISE_PAIRS = 3, 8
"""Limits of the number of pairs of the baseline with itself. Fewer than three decide no large gain in three pairs."""


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
    _noise: dict[int, Noise] = field(default_factory=dict)
    _loader_noise: Noise | None = None
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
        self._pace = self._loader_noise = None

    def update(self, i: int, *phase: PhaseOf) -> None:
        """Run the steps of one update on the batches of turn ``i``, with ``phase`` as in ``Stepper.step``."""
        job = self.job
        for k in range(job.spec.accumulate):
            job.stepper.step(job.data.batches[(i * job.spec.accumulate + k) % len(job.data.batches)], *phase)

    def blocks(self) -> Measure:
        """Return a function that measures block ``i``.

        An untimed update precedes each block, because toggling a candidate moves weights, clears caches and changes the
        state of the allocator. This update is omitted if updates are so long that its effect is negligible.
        """
        update_seconds = self.update_seconds

        def block(i: int) -> Block:
            if update_seconds <= LONG_UPDATE:
                self.update(i)
            return timed_block(self.update, range(i, i + self.updates_per_block), self.job.spec.device)

        return block

    @property
    def noise(self) -> Noise:
        """Noise of the steps at the present number of threads.

        Kept candidates change the time of a step more than its relative noise, which is therefore not measured again.
        """
        threads = torch.get_num_threads()
        if threads not in self._noise:
            seconds = 2 * self.updates_per_block * self.update_seconds
            affordable = min(MOST_NOISE_PAIRS, NOISE_SHARE * self.budget.seconds / seconds)
            block = self.blocks()
            self.rewind()
            pairs = [(block(i), block(i)) for i in range(max(FEWEST_NOISE_PAIRS, int(affordable)))]
            self.rewind()
            self._noise[threads] = Noise.of(pairs, one_thread=threads == 1 and self.job.spec.device.type == "cpu")
        return self._noise[threads]

    def loader_noise(self, stretch: Measure) -> Noise:
        """Return the noise of training from the present loader.

        Args:
            stretch: measures a stretch of this training.
        """
        if self._loader_noise is None:
            pairs = [(stretch(i), stretch(i)) for i in range(LOADER_NOISE_PAIRS)]
            self._loader_noise = Noise.of(pairs, one_thread=False)
        return self._loader_noise

    @property
    def known_noise(self) -> float | None:
        """Standard deviation of the log ratio of neighboring blocks, as measured last; None before."""
        return list(self._noise.values())[-1].floors["wall"].scale if self._noise else None

    @property
    def update_seconds(self) -> float:
        """Seconds of an update with the kept candidates, without waiting for batches."""
        return self.job.spec.accumulate * self.pace.step_ms / 1e3

    @property
    def updates_per_block(self) -> int:
        """Number of updates in a block."""
        return max(1, round(BLOCK_SECONDS / self.update_seconds))

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
            took = seconds(lambda b=batch: job.stepper.step(b), job.spec.device)  # type: ignore[misc]
        timed = [*batches, *batches] if took <= LONG_UPDATE else batches[:2]
        if self.rewindable:
            with closing(LoaderTimer(job, job.data.source)) as track:
                track.stretch(len(timed), settle=int(took <= LONG_UPDATE))  # the first stretch starts the workers
            pace = track.pace
        else:
            step = median(seconds(lambda b=b: job.stepper.step(b), job.spec.device) for b in timed)  # type: ignore[misc]
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
        fewest = 4 if step_seconds <= LONG_UPDATE else 1
        return self._whole_updates(min(50, max(fewest, math.ceil(STRETCH_SECONDS / step_seconds))))

    def pair_seconds(self) -> float:
        """Return the seconds of a stretch with each of two loops as fast as this one, warm-up included."""
        untimed = self.job.spec.accumulate if self.update_seconds <= LONG_UPDATE else 0
        return 2 * (self.stretch_steps() + untimed) * self.pace.total_ms / 1e3

    def _whole_updates(self, steps: int) -> int:
        return self.job.spec.accumulate * math.ceil(steps / self.job.spec.accumulate)

    def trial(self, old: Measure, new: Measure, *, keeps_cpu_time: bool, has_other_merits: bool = False) -> PairedTrial:
        """Run a trial of steps within the time limit.

        Args:
            old: measures a block of the baseline.
            new: measures a block of the candidate.
            keeps_cpu_time: True if the candidate's CPU time is comparable with the baseline's.
            has_other_merits: True if the candidate needs only be no slower.
        """
        trial = PairedTrial(self.noise, keeps_cpu_time=keeps_cpu_time, has_other_merits=has_other_merits)
        trial.run(old, new, *self.budget.deadlines(TRIAL_SECONDS))
        return trial

    @contextmanager
    def loops(
        self, old: LoaderTimer, new: LoaderTimer, on_for_new: Sequence[Candidate] = (), scale: float = 1.0
    ) -> Iterator[tuple[Measure, Measure]]:
        """Yield two functions that measure a stretch of training, from the old and from the new loader.

        Each loader first drains its queue, and continues until the other's workers have filled theirs. At least one
        untimed update precedes each stretch, as in ``blocks``.

        Args:
            old: the baseline.
            new: the candidate.
            on_for_new: candidates that are on only while ``new`` runs.
            scale: samples per batch of ``new``, relative to ``old``. Times of ``old`` are multiplied by it.
        """
        try:
            steps, fewest = self.stretch_steps(), int(self.update_seconds <= LONG_UPDATE)

            def stretch_old(_: int) -> Block:
                for candidate in reversed(on_for_new):
                    candidate.disable()
                return old.stretch(steps, max(fewest, old.queue), rest=new.refill_seconds).scaled(scale)

            def stretch_new(_: int) -> Block:
                for candidate in on_for_new:
                    candidate.enable()
                return new.stretch(steps, max(fewest, new.queue), rest=old.refill_seconds)

            yield stretch_old, stretch_new
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

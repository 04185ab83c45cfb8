"""Bench for trials: a job, its starting state, and the candidates that are on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from flatout.core.batches import batch_size_of
from flatout.core.snapshot import Snapshot
from flatout.mfu import MfuCounter
from flatout.report.model import Pace, Row
from flatout.techniques import Candidate, RecordedCandidate, ResizingCandidate
from flatout.training.job import Job
from flatout.training.stepper import PhaseOf
from flatout.tuning.block import Block
from flatout.tuning.budget import Budget
from flatout.tuning.equivalence import Observed
from flatout.tuning.ledger import Decision, Ledger
from flatout.tuning.loader_timer import LoaderTimer
from flatout.tuning.noise import Noise, Pair
from flatout.tuning.progress import Progress
from flatout.tuning.step_memory import step_memory
from flatout.tuning.timing import seconds, synchronize, timed_block
from flatout.tuning.trial import Measure, PairedTrial

TRIAL_SECONDS = 4.0
"""Time limit for the pairs of one trial, in seconds, until all techniques were tried. Set-up is extra."""

FEWEST_TRIAL_UPDATES = 7
"""Updates of the shortest trial: two to compare the numerics, and with outputs and the first block three pairs."""

PHASE_UPDATES = 8
PHASE_SECONDS = 1.0
"""Limits of the phase measurement: a number of updates, and seconds after which no further update starts."""

FEWEST_UPDATES = 4
"""Two updates for the memory of a step, and two for its phases."""

COSTS_SHARE = 0.05
"""Largest share of the budget for each of these measurements."""

STRETCH_SECONDS = 0.05
"""Duration of a stretch of training from one loader, in trials that alternate two loaders."""

BLOCK_SECONDS = 0.02
"""Duration of a block with one candidate, if updates are shorter."""

LONG_UPDATE = 0.5
"""Duration of an update, in seconds, up to which an untimed update precedes each block."""

MOST_RESULT_BYTES = 1 << 28
"""Size of the baseline's results above which they are computed for each candidate."""

NOISE_SHARE = 0.05
"""Share of the budget for the noise floor."""

LOADER_NOISE_PAIRS = 3
"""Number of pairs of training from the present loader with itself, before another loader is tried."""

FEWEST_NOISE_PAIRS, MOST_NOISE_PAIRS = 3, 8
"""Limits of the number of pairs of the baseline with itself. Fewer than three decide no large gain in three pairs.

Long updates are measured in the fewest pairs, which also give the pace.
"""


@dataclass
class Bench:
    """Training that trials step. ``rewind`` restores its starting state before each trial.

    Attributes:
        job: the training. ``job.data.source`` changes when a loader is kept.
        state: the state that every trial begins with.
        budget: seconds for all trials.
        rewindable: True if a trial may iterate the loader without losing samples.
        ledger: the decisions so far.
        progress: shown between timed regions.
    """

    job: Job
    state: Snapshot
    budget: Budget
    rewindable: bool
    ledger: Ledger = field(default_factory=Ledger)
    progress: Progress = field(default_factory=Progress)
    _noise: dict[int, Noise] = field(default_factory=dict)
    _loader_noise: Noise | None = None
    _pace: Pace | None = None
    _memory: int | None = None
    _results: dict[Hashable, Observed] = field(default_factory=dict)

    def rewind(self, *, to_train: bool = True) -> None:
        """Restore the training state, with exactly the kept candidates on.

        Args:
            to_train: set a model with an optimizer to train mode. A model from a checkpoint often arrives in eval mode,
                and training needs train mode.
        """
        self.progress.refresh()
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
        pace, resizes = self._pace, isinstance(decision.candidate, ResizingCandidate)
        is_long = pace is not None and self.is_long
        self.forget()
        if pace is not None and row.gain is not None and is_long and not resizes:  # too long to be measured again
            self._pace = pace.with_faster_steps(row.gain.ratio)
        return row

    def forget(self) -> None:
        """Forget pace, memory and results, because a decision changed them."""
        self._pace = self._memory = None
        self._results.clear()

    def use(self, source: Iterable[Any]) -> None:
        """Use another loader as the source of the training."""
        self.job.data.source = source
        self._pace = self._loader_noise = None

    def update(self, i: int, *phase: PhaseOf) -> None:
        """Run the steps of one update on the batches of turn ``i``, with ``phase`` as in ``Stepper.step``."""
        for k in range(self.job.spec.accumulate):
            self._step(i * self.job.spec.accumulate + k, *phase)

    def _step(self, i: int, *phase: PhaseOf) -> None:
        self.job.stepper.step(self.job.data.batches[i % len(self.job.data.batches)], *phase)

    def blocks(self) -> Measure:
        """Return a function that measures block ``i``.

        An untimed update precedes each block, because toggling a candidate moves weights, clears caches and changes the
        state of the allocator. This update is omitted if updates are so long that its effect is negligible.
        """
        is_long = self.is_long

        def block(i: int) -> Block:
            self.progress.refresh()
            if not is_long:
                self.update(i)
            return timed_block(self.update, range(i, i + self.updates_per_block), self.job.spec.device)

        return block

    @property
    def noise(self) -> Noise:
        """Noise of the steps at the present number of threads.

        Kept candidates change the time of a step more than its relative noise, which is therefore not measured again.
        The noise of long updates is measured once, with their pace.
        """
        if self.is_long:
            return next(iter(self._noise.values()))
        threads = torch.get_num_threads()
        if threads not in self._noise:
            affordable = min(MOST_NOISE_PAIRS, NOISE_SHARE * self.budget.seconds / (2 * self.block_seconds))
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
    def is_long(self) -> bool:
        """True if an update is so long that the effects of toggling a candidate on its time are negligible."""
        return self.update_seconds > LONG_UPDATE

    @property
    def updates_per_block(self) -> int:
        """Number of updates in a block."""
        return max(1, round(BLOCK_SECONDS / self.update_seconds))

    @property
    def block_seconds(self) -> float:
        """Seconds of a block, with its untimed update."""
        return (self.updates_per_block + int(not self.is_long)) * self.update_seconds

    @property
    def pace(self) -> Pace:
        """Pace of the job with the kept candidates."""
        if self._pace is None:
            self._pace = self._measure_pace()
        return self._pace

    def _measure_pace(self) -> Pace:
        """Measure a stretch of training. Long updates are measured one by one, and their noise with them."""
        job, batches = self.job, self.job.data.batches
        self.rewind()
        for batch in batches[:2]:
            took = seconds(lambda b=batch: job.stepper.step(b), job.spec.device)  # type: ignore[misc]
            if took > LONG_UPDATE:
                break
        is_long = job.spec.accumulate * took > LONG_UPDATE
        steps, stretches = 2 * len(batches), 1
        if is_long:
            steps, stretches = job.spec.accumulate, 2 if self._noise else 2 * FEWEST_NOISE_PAIRS
        if self.rewindable:
            with closing(LoaderTimer(job, job.data.source)) as track:
                untimed = int(not is_long or track.queue > 0)  # the first stretch starts the workers
                blocks = [track.stretch(steps, settle=0 if i else untimed) for i in range(stretches)]
            pace = track.pace
        else:
            turns = [range(i * steps, (i + 1) * steps) for i in range(stretches)]
            blocks = [timed_block(self._step, turn, job.spec.device) for turn in turns]
            step = median(wall for block in blocks for wall in block.wall)
            pace = Pace(step_ms=1e3 * step, load_ms=0.0, samples_per_second=batch_size_of(batches[0]) / step)
        self.rewind()
        if is_long and not self._noise:
            pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
            self._noise[torch.get_num_threads()] = Noise.of(pairs, one_thread=False)
        return pace

    @property
    def memory(self) -> int | None:
        """Peak memory of an update above the resident memory, in bytes, with the kept candidates; None if unknown."""
        if self._memory is None:
            self._memory = self.memory_with()
        return self._memory

    @property
    def measures_memory(self) -> bool:
        """True if trials measure memory. On the CPU this takes two more updates, and a profiler."""
        return not self.is_long or self.job.spec.device.type == "cuda"

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

    def baseline_results(self, key: Hashable, observe: Callable[[], Observed]) -> Observed:
        """Return the results of a run with the kept candidates, and keep them for the next call if they are small.

        Args:
            key: what ``observe`` depends on besides the kept candidates.
            observe: runs the training from its starting state.
        """
        results = self._results.get(key)
        if results is None:
            self.rewind()
            results = observe()
            if results.nbytes <= MOST_RESULT_BYTES:
                self._results[key] = results
        return results

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
        return ms / 1e3 <= COSTS_SHARE * self.budget.seconds

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
        untimed = 0 if self.is_long else self.job.spec.accumulate
        return 2 * (self.stretch_steps() + untimed) * self.pace.total_ms / 1e3

    @property
    def fewest_seconds(self) -> float:
        """Seconds of the shortest trial that shows a gain of two, without its setup."""
        return FEWEST_TRIAL_UPDATES * self.job.spec.accumulate * self.pace.total_ms / 1e3

    def _whole_updates(self, steps: int) -> int:
        return self.job.spec.accumulate * math.ceil(steps / self.job.spec.accumulate)

    def trial(
        self,
        old: Measure,
        new: Measure,
        *,
        earlier: Sequence[Pair] = (),
        keeps_cpu_time: bool,
        has_other_merits: bool = False,
    ) -> PairedTrial:
        """Run a trial of steps within the time limit.

        Args:
            old: measures a block of the baseline.
            new: measures a block of the candidate.
            earlier: pairs that were measured before.
            keeps_cpu_time: True if the candidate's CPU time is comparable with the baseline's.
            has_other_merits: True if the candidate needs only be no slower.
        """
        trial = PairedTrial(self.noise, keeps_cpu_time=keeps_cpu_time, has_other_merits=has_other_merits)
        for pair in earlier:
            trial.add(pair)
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
            steps, fewest = self.stretch_steps(), int(not self.is_long)

            def stretch_old(_: int) -> Block:
                self.progress.refresh()
                for candidate in reversed(on_for_new):
                    candidate.disable()
                return old.stretch(steps, max(fewest, old.queue), rest=new.refill_seconds).scaled(scale)

            def stretch_new(_: int) -> Block:
                self.progress.refresh()
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

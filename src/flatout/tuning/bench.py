"""Bench for trials: a job, its starting state, and the candidates that are on."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from flatout.core.snapshot import Snapshot
from flatout.distributed.agreement import Agreement
from flatout.mfu import TensorCores
from flatout.report.model import Pace, Row
from flatout.techniques import Candidate
from flatout.training.job import Job
from flatout.training.stepper import PhaseOf
from flatout.tuning.budget import BLOCK_SECONDS, Budget
from flatout.tuning.ledger import Decision, Ledger
from flatout.tuning.pairs import Noise, Pair, PairedTrial, pairs_of
from flatout.tuning.progress import Progress
from flatout.tuning.statistics import FEWEST_PAIRS
from flatout.tuning.stopwatch import (
    FEWEST_FOR_QUARTILE,
    Block,
    LoaderComparison,
    Measure,
    Stopwatch,
    in_turns,
    seconds,
    step_memory,
    timed_block,
    workers_and_queue,
)

TRIAL_SECONDS = 4.0
"""Time limit for the pairs of one trial, in seconds, until all techniques were tried. Setup takes extra time."""

PACE_SECONDS = 1.0
"""Seconds of a stretch that measures the pace, unless steps are short. Each decision changes the pace."""

STRETCH_SECONDS = 0.05
"""Duration in seconds of a stretch of training from one loader, in trials that alternate two loaders."""

SLOWEST_STRETCH = 4.0
"""Time limit of a stretch: this multiple of its expected duration, but at least ``PACE_SECONDS``.

If other programs run, two threads may share a core. A stretch is then forty times slower for some seconds.
"""

LONG_UPDATE, LONG_SCRIPT_UPDATE = 0.5, 0.02
"""Durations of an update, in seconds, up to which an untimed update precedes each block.

The second one applies to a script, which keeps its own loop. A script leaves no time for longer untimed updates.
"""

MOST_RESULT_BYTES = 1 << 28
"""Largest size of baseline results that are kept. Larger results are computed again for each candidate."""

SHARE = 0.05
"""Share of the budget for the noise floor, for each other measurement beside trials, and for advice."""

MOST_NOISE_PAIRS = 8
"""Most pairs of the baseline with itself.

Long updates and loops over two loaders take the fewest pairs. The pairs of long updates also give the pace.
"""


@dataclass
class Bench:
    """Training whose steps trials run. ``rewind`` restores the starting state before each trial.

    Attributes:
        job: the training. ``job.data.source`` changes when a loader is kept.
        state: the state that every trial begins with.
        budget: seconds for all trials.
        rewindable: True if a trial may iterate the loader without losing samples.
        ledger: the decisions so far.
        progress: shown between timed regions.
        comparison: the trial that the present loader won; None without one, and after a change of the steps.
        phases: share of each phase in the time of these steps; empty if unknown, None before ``costs_of`` measures it.
        tensor_cores: activity of the tensor cores in these steps; None if unknown.
        screened: duration of the latest screening of a candidate, in updates, without the results of the baseline that
            are kept for the next candidate; None before the first one.
        kept_seconds: seconds of all results of the baseline that were kept for later candidates.
        exposed_ms: exposed communication of these steps; None before ``rank_costs.exposed_ms`` measures it.
    """

    job: Job
    state: Snapshot
    budget: Budget
    rewindable: bool
    ledger: Ledger = field(default_factory=Ledger)
    progress: Progress = field(default_factory=Progress)
    comparison: LoaderComparison | None = None
    phases: Mapping[str, float] | None = None
    tensor_cores: TensorCores | None = None
    exposed_ms: float | None = None
    screened: float | None = None
    kept_seconds: float = 0.0
    _noise: dict[int, Noise] = field(default_factory=dict)
    _pace: Pace | None = None
    _loop_pairs: list[Pair] = field(default_factory=list)
    _busy: float = 1.0
    _memory: int | None = None
    _results: dict[Hashable, Any] = field(default_factory=dict)
    _kept_updates: float = 1.0

    @property
    def ranks(self) -> Agreement:
        """Agreement with the other ranks, which run the same trials."""
        return self.job.spec.ranks

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

    def begin(self, state: Snapshot, budget: Budget) -> None:
        """Set another starting state and budget for the next trials."""
        self.state, self.budget = state, budget
        self._results.clear()
        self.rewind()

    def keep(self, decision: Decision) -> Row:
        """Record a decision to keep a technique, and leave its candidate on."""
        row = self.ledger.add(decision)
        if decision.candidate is not None:
            decision.candidate.enable()
        pace, resizes = self._pace, decision.candidate is not None and decision.candidate.resizes
        is_long = pace is not None and self.is_long
        self.forget()
        if pace is not None and row.gain is not None and is_long and not resizes:  # too long to be measured again
            self._pace = pace.with_faster_steps(row.gain.ratio)
        return row

    def forget(self) -> None:
        """Discard all measurements of the loop, because a decision has changed it."""
        self._pace = self._memory = self.exposed_ms = self.phases = self.tensor_cores = self.comparison = None
        self._results.clear()

    def use(self, source: Iterable[Any], comparison: LoaderComparison | None = None) -> None:
        """Use another loader as the source of the training.

        Args:
            source: the loader.
            comparison: the trial of this loader against the present one, if there was one.
        """
        self.job.data.source = source
        self.comparison = comparison
        self._pace = None if comparison is None else comparison.after
        self._loop_pairs = []

    def update(self, i: int, *phase: PhaseOf) -> None:
        """Run the steps of one update on the batches of turn ``i``, with ``phase`` as in ``Stepper.step``."""
        steps = self.job.spec.accumulate
        for k in range(i * steps, (i + 1) * steps):
            self._step(k, *phase)

    def _step(self, i: int, *phase: PhaseOf) -> None:
        self.job.stepper.step(self.job.data.batches[i % len(self.job.data.batches)], *phase)

    def blocks(self) -> Measure:
        """Return a function that measures block ``i``.

        An untimed update precedes each block, because toggling a candidate moves weights, clears caches and changes the
        state of the allocator. This update is omitted if updates are so long that its effect is negligible. A new DDP
        needs more updates until it overlaps the backward.
        """
        fewest = 0 if self.is_long else 1

        def block(i: int) -> Block:
            self.progress.refresh()
            for _ in range(max(fewest, self.job.stepper.steps_to_settle)):
                self.update(i)
            updates = range(i, i + self.updates_per_block)
            return timed_block(self.update, updates, self.job.spec.device, self.ranks)

        return block

    @property
    def noise(self) -> Noise:
        """Noise of the steps at the present number of threads.

        Kept candidates change the time of a step more than its relative noise, which is therefore not measured again.
        The noise of long updates is measured once, with their pace.
        """
        if self.is_long and self._noise:
            return next(iter(self._noise.values()))
        threads = self._threads
        if threads not in self._noise:
            affordable = min(MOST_NOISE_PAIRS, SHARE * self.budget.seconds / (2 * self.block_seconds))
            block = self.blocks()
            self.rewind()
            pairs = [(block(i), block(i)) for i in range(max(FEWEST_PAIRS, int(affordable)))]
            self.rewind()
            self._noise[threads] = Noise.of(pairs, one_thread=threads == 1 and self.job.spec.device.type == "cpu")
        return self._noise[threads]

    @property
    def _threads(self) -> int:
        return int(self.ranks.largest([torch.get_num_threads()])[0])

    def loader_noise(self, stretch: Measure) -> Noise:
        """Return the noise of training from the present loader.

        Args:
            stretch: measures a stretch of this training.
        """
        missing = range(len(self._loop_pairs), FEWEST_PAIRS)
        self._loop_pairs += [(stretch(i), stretch(i)) for i in missing]
        return Noise.of(self._loop_pairs, one_thread=False)

    @property
    def known_noise(self) -> float | None:
        """Standard deviation of the log ratio of neighboring blocks, by the latest measurement; None without one."""
        return list(self._noise.values())[-1].floors["wall"].scale if self._noise else None

    @property
    def update_seconds(self) -> float:
        """Seconds of an update with the kept candidates, without waiting for batches."""
        return self.job.spec.accumulate * self.pace.step_ms / 1e3

    @property
    def long_update(self) -> float:
        """Seconds of an update above which it is long."""
        return LONG_SCRIPT_UPDATE if self.job.spec.is_recorded else LONG_UPDATE

    @property
    def is_long(self) -> bool:
        """True if an update is so long that the effects of toggling a candidate on its time are negligible."""
        return self.update_seconds > self.long_update

    @property
    def is_slow(self) -> bool:
        """True if an update and the wait for its batches are so long that loops rarely settle and change."""
        return self.job.spec.accumulate * self.pace.total_ms / 1e3 > LONG_UPDATE

    @property
    def _is_timed_alone(self) -> bool:
        """True if an update and the wait for its batches take long enough for a stretch of one update."""
        return self.job.spec.accumulate * self.pace.total_ms / 1e3 > self.long_update

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
            took = seconds(lambda b=batch: job.stepper.step(b), job.spec.device, self.ranks)  # type: ignore[misc]
            if took > self.long_update:
                break
        is_long = job.spec.accumulate * took > self.long_update
        steps, stretches = max(2, min(2 * len(batches), math.ceil(PACE_SECONDS / took))), 1
        if is_long:
            steps, stretches = job.spec.accumulate, 2 if self._noise else 2 * FEWEST_PAIRS
        with closing(self.watch()) as watch:
            blocks = self._pace_blocks(watch, steps, stretches)
            pace = watch.pace
        self.rewind()
        if is_long and len(blocks) > 1 and not self._noise:
            self._noise[self._threads] = Noise.of(pairs_of(blocks), one_thread=False)
        return pace

    def watch(self) -> Stopwatch:
        """Return a stopwatch for training from the present loader, or from the trial batches if it must not be read."""
        return Stopwatch(self.job, self.job.data.source if self.rewindable else None)

    def _pace_blocks(self, watch: Stopwatch, steps: int, count: int) -> list[Block]:
        """Return blocks of training from a loader.

        Long updates are blocks of one update each. Shorter updates are one block, after an untimed update.
        """
        update = self.job.spec.accumulate
        watch.settle(update if watch.queue else 0)  # workers start
        blocks = [watch.block(update)]
        if blocks[0].mean > self.long_update:
            blocks += [watch.block(update) for _ in range(1, max(2, count))]
            self._loop_pairs = self._loop_pairs or pairs_of(blocks)
        else:
            watch.blocks.clear()
            blocks = [watch.block(steps)]
        self._busy = self._busy if watch.queue else watch.busy
        return blocks

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
        """Return ``memory`` with more candidates on.

        The memory of a script on the CPU is unknown, because the profiler is not used there. After a profile, a process
        that the script forks would hang at its exit, in the destructor of ``libkineto::ConfigLoader`` (torch 2.14).
        """
        spec = self.job.spec
        if spec.is_recorded and spec.device.type == "cpu":
            return None
        if any(candidate.steps_to_record for candidate in (*self.ledger.candidates, *candidates)):
            return None  # replays allocate nothing
        self.rewind()
        with ExitStack() as stack:
            for candidate in candidates:
                stack.enter_context(candidate)
            try:
                with self.ranks.attempt():
                    return step_memory(lambda: self.update(0), self.job.spec.device, ranks=self.ranks)
            except RuntimeError:  # the error comes from the profiler, because the step itself has run before
                return None
            finally:
                self.rewind()

    def baseline_results(self, key: Hashable, observe: Callable[[], Any]) -> Any:
        """Return the results of a run with the kept candidates, and keep them for the next call if they are small.

        Args:
            key: what ``observe`` depends on besides the kept candidates.
            observe: runs the training from its starting state.
        """
        results = self._results.get(key)
        if results is None:
            self.rewind()
            begun = self.ranks.now()
            results = observe()
            took = self.ranks.now() - begun
            if self.ranks.largest([results.nbytes])[0] <= MOST_RESULT_BYTES:
                self._results[key] = results
                self.kept_seconds += took
                self._kept_updates = took / self.update_seconds
            else:
                self._kept_updates = 0.0
        return results

    @property
    def updates_to_observe(self) -> float:
        """Updates that the baseline's results take before the next screening; 0 if results are kept.

        Results that are too large are measured for each candidate, and count as a part of its screening.
        """
        return 0.0 if self._results else self._kept_updates

    def stretch_steps(self, queue: int = 0) -> int:
        """Return the number of batches per stretch: long enough to time, and whole updates.

        Args:
            queue: batches that workers make in advance. A stretch of a single long update requires an empty queue.
        """
        step_seconds, per_update = self.pace.total_ms / 1e3, self.job.spec.accumulate
        fewest = max(1, min(FEWEST_FOR_QUARTILE, int(LONG_UPDATE / step_seconds)))
        if self._is_timed_alone and not queue:
            fewest = 1
        steps = min(50, max(fewest, math.ceil(STRETCH_SECONDS / step_seconds)))
        return per_update * math.ceil(steps / per_update)

    def pair_seconds(self) -> float:
        """Return the seconds of a stretch with each of two loops like this one, with settling and resting."""
        workers, queue = workers_and_queue(self.job, self.job.data.source)
        batches = max(self.stretch_steps(queue), workers) + max(self._untimed_steps(queue), queue)
        return 2 * batches * self.pace.total_ms / 1e3

    def _untimed_steps(self, queue: int) -> int:
        """Return the number of untimed batches before a stretch. A change has a negligible effect on long updates."""
        return 0 if self.is_slow or (self._is_timed_alone and not queue) else self.job.spec.accumulate

    @property
    def fewest_loader_seconds(self) -> float:
        """Seconds of the shortest trial of a loader that shows a large gain, without its setup.

        The estimate assumes that a batch takes as long from the other loader. At least the first batch does.
        """
        stretches = 2 * (FEWEST_PAIRS - len(self._loop_pairs) + FEWEST_PAIRS)
        return stretches * self.stretch_steps(1) * self.pace.total_ms / 1e3

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
            has_other_merits: True if being no slower is enough for the candidate.
        """
        trial = PairedTrial(
            self.noise, keeps_cpu_time=keeps_cpu_time, has_other_merits=has_other_merits, ranks=self.ranks
        )
        for pair in earlier:
            trial.add(pair)
        trial.run(old, new, *self.budget.deadlines(TRIAL_SECONDS))
        return trial

    def loops(
        self, old: Stopwatch, new: Stopwatch, on_for_new: Sequence[Candidate] = (), scale: float = 1.0
    ) -> AbstractContextManager[tuple[Measure, Measure]]:
        """Return two functions that measure a block of training, from the old and from the new loader.

        Args:
            old: the baseline.
            new: the candidate.
            on_for_new: candidates that are on only while ``new`` runs.
            scale: samples per batch of ``new``, relative to ``old``. Times of ``old`` are multiplied by it.
        """
        queue = max(old.queue, new.queue)
        steps = self.stretch_steps(queue)
        expected = max(1.0, scale) * steps * self.pace.total_ms / 1e3
        return in_turns(
            old,
            new,
            self.progress,
            steps=steps,
            limit=max(PACE_SECONDS, SLOWEST_STRETCH * expected),
            settle=max([self._untimed_steps(queue), *(candidate.steps_to_record for candidate in on_for_new)]),
            busy=self._busy,
            on_for_new=on_for_new,
            scale=scale,
        )


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

"""Recording of training steps: warm-up, search for syncs, timed steps, and steps under the profiler."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity
from torch.profiler import profile as TorchProfiler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flatout.core.batches import batch_size_of
from flatout.core.kineto import quiet_allocator, quiet_kineto
from flatout.profile import nsight
from flatout.profile.phase_timer import HostClock, PhaseTimer
from flatout.profile.profile_data import Step, Sync, TraceFile
from flatout.profile.shown_profile import Profile
from flatout.profile.summary import summarise
from flatout.profile.syncs import replaced, watching
from flatout.profile.trace import BOUNDARY, Trace
from flatout.report.model import Row

SEARCHED_STEPS = 2
"""Number of steps that are searched for syncs. These steps are not timed, because the search slows every operator."""
_AHEAD_ON_CUDA = 2  # batches that a flatout.data.Prefetcher fetches ahead
_MOST_AHEAD = 64
_ONE = "torch has only one profiler, and flatout needs it: take the loop's own torch.profiler out"

Course = Generator[bool, None, None]
"""Generator that records a loop. The loop calls ``next`` before its first step and after each step, then ``close``.

The generator yields False while it needs more steps, and True when it needs none. It may also end then.
"""


def profile_run(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    steps: int = 10,
    warmup: int = 3,
    *,
    verdict: Callable[[Step], str] | None = None,
    rows: Sequence[Row] = (),
) -> Profile:
    """Profile a loop of ``step(batch)`` over ``loader``, which continues from epoch to epoch.

    Every step trains. The first ``warmup`` steps warm up. Two steps search for syncs. Some steps consume the batches
    that loaders have prefetched. The next ``steps`` steps are timed without the profiler. Then ``steps`` more steps run
    under the profiler. On a GPU, one extra step precedes the timed steps, and one precedes the profiled steps.

    Args:
        loader: yields batches. Each epoch is a new iteration over the loader.
        step: trains on a batch.
        steps: number of steps to time, and number of steps to profile.
        warmup: number of steps before all others.
        verdict: returns ``Profile.verdict`` for the mean of the timed steps. The call follows the last timed step.
        rows: rows of the report on this training. Advice leaves out techniques that the report has decided.

    Returns:
        The profile. The profile covers fewer steps if an epoch of ``loader`` is empty before the end.

    Raises:
        ValueError: ``steps`` < 1, ``warmup`` < 0, or ``loader`` ends before a step is timed.
        RuntimeError: another profiler of torch is active.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    if warmup < 0:
        raise ValueError(f"warmup must be >= 0, got {warmup}")
    recording = ProfileRecording(steps, warmup, verdict, rows)
    course = recording.course()
    samples: list[int] = []
    try:
        next(course)
        for batch in _endless(loader):
            step(batch)
            samples.append(batch_size_of(batch))
            if next(course, True):
                break
    finally:
        course.close()
    timed = samples[recording.before : recording.before + recording.timed]
    commands = nsight.commands_of_main(steps, warmup) if torch.cuda.is_initialized() else ()
    return recording.profile(sum(timed) / max(1, len(timed)), commands)


class ProfileRecording:
    """Recording of a loop. Steps that end before ``course`` is closed are kept.

    Args:
        steps: number of steps to time, and number of steps to profile.
        warmup: steps before all others.
        verdict: as for ``profile_run``.
        rows: as for ``profile_run``.

    Attributes:
        before: number of steps before the first timed one.
    """

    def __init__(
        self, steps: int, warmup: int, verdict: Callable[[Step], str] | None = None, rows: Sequence[Row] = ()
    ) -> None:
        self.before = warmup + SEARCHED_STEPS
        self._steps = steps
        self._warmup = warmup
        self._judge = verdict
        self._rows = rows
        self._verdict = ""
        self._syncs: list[Sync] = []
        self._timer = self._profiled = PhaseTimer(HostClock())
        self._trace = TraceFile()

    @property
    def timed(self) -> int:
        """Number of steps timed so far."""
        return self._timer.count

    def profile(self, samples: float | None = None, commands: Sequence[str] = ()) -> Profile:
        """Return the profile of the recorded steps. The arguments are those of ``summarise``.

        Raises:
            ValueError: no step was timed.
        """
        if self.timed == 0:
            raise ValueError("there is nothing to profile: the loop ended before the first step was timed")
        profiled = self._profiled.steps()
        return summarise(
            self._timer.steps(),
            Trace.read(self._trace.path) if profiled else None,
            before=self.before,
            profiled=profiled,
            syncs=self._syncs,
            samples=samples,
            commands=commands,
            verdict=self._verdict,
            rows=self._rows,
            trace_file=self._trace if profiled else None,
        )

    def course(self) -> Course:
        """Record the loop from its first step to its last."""
        yield from _wait(self._warmup)
        yield from self._search()
        if torch.autograd._profiler_enabled():
            raise RuntimeError(_ONE)
        _load_cupti()
        profiler = TorchProfiler(activities=_activities(), record_shapes=True, profile_memory=True, with_stack=True)
        with _refused(profiler):
            # Loaders have prefetched batches in the meantime. Timed steps must not use batches that need no wait.
            # On a GPU, one more step lets the host run ahead of the GPU before timing begins.
            ahead = _ahead() + torch.cuda.is_initialized()
            self.before += ahead
            yield from _wait(ahead)
            yield from self._time()
            yield from self._profile(profiler)

    def _search(self) -> Course:
        steps = []
        for _ in range(SEARCHED_STEPS):
            with watching(torch.cuda.is_initialized()) as seen:
                yield False
            steps.append(seen)
        self._syncs = [
            Sync(*found, count / SEARCHED_STEPS, is_in_every_step=all(found in seen for seen in steps))
            for found, count in sum(steps, Counter()).most_common()
        ]

    def _time(self) -> Course:
        self._timer = PhaseTimer()
        with self._timer.listening():
            yield from self._counted(self._timer)
        if self._judge is not None:
            self._verdict = self._judge(Step.mean(self._timer.steps()))

    def _counted(self, timer: PhaseTimer, mark: Callable[[], object] = lambda: None) -> Course:
        """Record steps, each between two boundaries."""
        timer.boundary()
        mark()
        for _ in range(self._steps):
            yield False
            timer.boundary()
            mark()

    def _profile(self, profiler: TorchProfiler) -> Course:
        with quiet_kineto():
            profiler.start()
        with quiet_allocator():
            try:
                if torch.cuda.is_initialized():  # lets the host run ahead of the GPU before profiling begins
                    yield False
                self._profiled = PhaseTimer()
                yield from self._counted(self._profiled, _mark)
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
            finally:
                profiler.stop()
                if self._profiled.count:
                    profiler.export_chrome_trace(str(self._trace.path))


def _wait(steps: int) -> Course:
    """Let ``steps`` steps pass."""
    for _ in range(steps):
        yield False


def _activities() -> list[ProfilerActivity]:
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]


def _load_cupti() -> None:
    """Start a profiler on a GPU once. The first start is slow, and loaders would run ahead during the start."""
    if torch.cuda.is_initialized():
        with TorchProfiler(activities=_activities()):
            pass


def _refused(ours: TorchProfiler) -> ExitStack:
    """Make other profilers raise until the returned stack is closed. A second one would crash the process."""

    def unless_ours(method: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(profiler: Any) -> None:
            if profiler is not ours.profiler:
                raise RuntimeError(_ONE)
            method(profiler)

        return call

    stack = ExitStack()
    for name in ("_prepare_trace", "_start_trace"):
        stack.enter_context(replaced(torch.autograd.profiler.profile, name, unless_ours))
    return stack


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of epoch after epoch, until an epoch is empty."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch


def _mark() -> None:
    with record_function(BOUNDARY):
        pass


def _ahead() -> int:
    """Return the number of batches that running loaders may have prefetched."""
    stores = [
        loader._num_workers * loader._prefetch_factor
        for loader in gc.get_objects()
        if type(loader) is _MultiProcessingDataLoaderIter
    ]
    return min(_MOST_AHEAD, max(stores, default=0) + (_AHEAD_ON_CUDA if torch.cuda.is_initialized() else 0))

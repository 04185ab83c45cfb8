"""Records training steps: a warm-up, a search for syncs, then the steps that are timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flatout.core.batches import batch_size_of
from flatout.core.kineto import quiet_allocator, quiet_kineto
from flatout.profile import nsight
from flatout.profile.profile_data import Sync, TraceFile
from flatout.profile.shown_profile import Profile
from flatout.profile.summary import summarise
from flatout.profile.syncs import replaced, watching
from flatout.profile.trace import BOUNDARY, Trace

SEARCHED_STEPS = 2
"""Steps in which syncs are looked for, before the timed ones: watching every operator slows them down."""
_AHEAD_ON_CUDA = 2  # batches that a flatout.data.Prefetcher fetches ahead
_MOST_AHEAD = 64
_ONE = "torch has only one profiler, and flatout needs it: take the loop's own torch.profiler out"

Course = Generator[bool, None, None]
"""What a loop is taken through: ``next`` before its first step and after every one, ``close`` behind the last. Yields
whether it is done; it is when it has ended, too."""


def profile_run(
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    steps: int = 10,
    warmup: int = 3,
    *,
    verdict: Callable[[], str] = str,
) -> Profile:
    """Profiles a loop of ``step(batch)`` over ``loader``, which goes on from epoch to epoch.

    Args:
        loader: yields batches; iterated as often as needed.
        step: trains on a batch.
        steps: to time.
        warmup: steps before; two more look for syncs, and some more use up what loader workers have in store.
        verdict: for ``Profile.verdict``; asked for after the warm-up.

    Raises:
        ValueError: ``steps`` < 1, ``warmup`` < 0, or a loader that ends before a step could be timed.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    if warmup < 0:
        raise ValueError(f"warmup must be >= 0, got {warmup}")
    recording = ProfileRecording(steps, warmup, verdict)
    course = recording.course()
    samples: list[int] = []
    try:
        next(course)
        for batch in _again_and_again(loader):
            step(batch)
            samples.append(batch_size_of(batch))
            if next(course, True):
                break
    finally:
        course.close()
    recent = samples[-steps:]
    commands = nsight.commands_of_main(steps, warmup) if torch.cuda.is_initialized() else ()
    return recording.profile(sum(recent) / max(1, len(recent)), commands)


class ProfileRecording:
    """What is recorded of a loop on its course. Steps timed before the course is closed are kept.

    Args:
        steps: to time.
        warmup: steps before anything is looked at.
        verdict: for ``Profile.verdict``; asked for after the warm-up, while nothing slows the steps down.

    Attributes:
        timed: steps timed so far.
    """

    def __init__(self, steps: int, warmup: int, verdict: Callable[[], str] = str) -> None:
        self.timed = 0
        self._steps = steps
        self._warmup = warmup
        self._judge = verdict
        self._verdict = ""
        self._unprofiled: float | None = None
        self._syncs: list[Sync] = []
        self._trace = TraceFile()

    def profile(self, samples: float | None = None, commands: Sequence[str] = ()) -> Profile:
        """What was recorded; for the arguments see ``summarise``.

        Raises:
            ValueError: no step was timed.
        """
        if self.timed == 0:
            raise ValueError("there is nothing to profile: the loop ended before the first step was timed")
        return summarise(
            Trace.read(self._trace.path),
            unprofiled_seconds=self._unprofiled,
            syncs=self._syncs,
            samples=samples,
            commands=commands,
            verdict=self._verdict,
            trace_file=self._trace,
        )

    def course(self) -> Course:
        """All of it; yields to the loop between its steps."""
        yield from self._warm_up()
        self._verdict = self._judge()
        yield from self._search()
        yield from self._time()

    def _warm_up(self) -> Course:
        if self._warmup:
            yield False
        begun = _now()
        for _ in range(self._warmup - 1):
            yield False
        if self._warmup > 1:
            self._unprofiled = (_now() - begun) / (self._warmup - 1)

    def _search(self) -> Course:
        with watching(torch.cuda.is_initialized()) as seen:
            for _ in range(SEARCHED_STEPS):
                yield False
        self._syncs = [Sync(*found, count / SEARCHED_STEPS) for found, count in seen.most_common()]

    def _time(self) -> Course:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True)
        if torch.autograd._profiler_enabled():
            raise RuntimeError(_ONE)
        with quiet_kineto():
            profiler.prepare_trace()
        running = False
        others = _refused(profiler)
        others.enter_context(quiet_allocator())
        try:
            # Loaders have run ahead in all this: what they have in store must not make them look fast.
            for _ in range(_ahead()):
                yield False
            profiler.start_trace()
            running = True
            if torch.cuda.is_initialized():  # the GPU is behind the host: so it shall be when timing begins
                yield False
            _mark()
            for _ in range(self._steps):
                yield False
                _mark()
                self.timed += 1
            _now()
        finally:
            if not running:  # what was prepared can only be ended by way of a start
                profiler.start_trace()
            profiler.stop_trace()
            others.close()
            if self.timed:
                profiler.export_chrome_trace(str(self._trace.path))


def _refused(ours: profile) -> ExitStack:
    """Until it is closed, other profilers raise: torch would end the process when a second one starts."""

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


def _again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch, until one is empty."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch


def _mark() -> None:
    with record_function(BOUNDARY):
        pass


def _now() -> float:
    """Seconds, with nothing left to do for the device."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _ahead() -> int:
    """Batches that loaders under way may have in store."""
    stores = [
        loader._num_workers * loader._prefetch_factor
        for loader in gc.get_objects()
        if type(loader) is _MultiProcessingDataLoaderIter
    ]
    return min(_MOST_AHEAD, max(stores, default=0) + (_AHEAD_ON_CUDA if torch.cuda.is_initialized() else 0))

"""Recording of training steps: warm-up, search for syncs, timed steps, and steps under torch's profiler."""

from __future__ import annotations

import gc
import gzip
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity
from torch.profiler import profile as TorchProfiler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flatout.core.batches import batch_size_of
from flatout.core.kineto import allocated_peak, quiet_allocator, quiet_kineto
from flatout.core.machine import environment_of
from flatout.profile.advice import advise
from flatout.profile.phase_timer import PhaseTimer
from flatout.profile.profile_data import Operator, Step, Sync
from flatout.profile.shown_profile import Profile
from flatout.profile.syncs import watching
from flatout.report.model import Row

SEARCHED_STEPS = 2
"""Number of steps that are searched for syncs. These steps are not timed, because the search slows every operator."""
_AHEAD_ON_CUDA = 2  # batches that a flatout.data.Prefetcher fetches ahead
_MOST_AHEAD = 64
_OPERATORS = 15  # of a profile at most
_BOUNDARY = "flatout.boundary"  # range without length between two profiled steps
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
        RuntimeError: the loop uses another profiler of torch.
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
    return recording.profile(sum(timed) / max(1, len(timed)))


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
        self._timer = self._profiled = PhaseTimer()
        self._profiler: TorchProfiler | None = None
        self._allocated = 0  # bytes on the GPU at the start of the first profiled step

    @property
    def timed(self) -> int:
        """Number of steps timed so far."""
        return self._timer.count

    def course(self) -> Course:
        """Record the loop from its first step to its last."""
        yield from _steps(self._warmup)
        searched = []
        for _ in range(SEARCHED_STEPS):
            timer = PhaseTimer()
            with timer.listening(), watching(torch.cuda.is_initialized(), timer.phase) as seen:
                yield False
            searched.append(seen)
        self._syncs = [
            Sync(*found, count / SEARCHED_STEPS, is_in_every_step=all(found in seen for seen in searched))
            for found, count in sum(searched, Counter()).most_common()
        ]

        on_gpu = torch.cuda.is_initialized()
        if on_gpu:  # the first start is slow, and loaders would run ahead during the start
            with _make_profiler():
                pass
        # Loaders have prefetched batches in the meantime. Timed steps must not use batches that need no wait.
        # On a GPU, one more step lets the host run ahead of the GPU before timing begins.
        ahead = _ahead() + on_gpu
        self.before += ahead
        yield from _steps(ahead)

        self._timer = PhaseTimer()
        with self._timer.listening():
            yield from _steps(self._steps, self._timer.boundary)
        if self._judge is not None:
            self._verdict = self._judge(Step.mean(self._timer.steps()))

        self._profiler = _make_profiler()
        with quiet_kineto():
            self._profiler.start()
        with quiet_allocator():
            try:
                if on_gpu:
                    yield False
                    self._allocated = torch.cuda.memory_allocated()
                self._profiled = PhaseTimer()
                yield from _steps(self._steps, self._mark)
                if on_gpu:
                    torch.cuda.synchronize()
            finally:
                self._profiler.stop()

    def _mark(self) -> None:
        self._profiled.boundary()
        with record_function(_BOUNDARY):
            pass

    def profile(self, samples: float | None = None) -> Profile:
        """Return the profile of the recorded steps. Call this once.

        Args:
            samples: samples per step; None if unknown.

        Raises:
            ValueError: no step was timed.
            RuntimeError: the loop started another profiler of torch.
        """
        if self.timed == 0:
            raise ValueError("there is nothing to profile: the loop ended before the first step was timed")
        steps, profiled = self._timer.steps(), self._profiled.steps()
        mean, device = Step.mean(steps), torch.device("cpu")
        if torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        profile = Profile(
            steps=steps,
            seconds=mean.seconds,
            before=self.before,
            samples=samples,
            phases=mean.phases,
            syncs=tuple(self._syncs),
            environment=environment_of(device),
            verdict=self._verdict,
        )
        if profiled and self._profiler is not None:
            averages, seconds = _averages(self._profiler), Step.mean(profiled).seconds
            kernels = _device_seconds(averages) / len(profiled)
            profile = replace(
                profile,
                profiled_steps=len(profiled),
                profiled_seconds=seconds,
                operators=_operators(averages, len(profiled), seconds, on_gpu=kernels > 0),
                device_busy=min(1.0, kernels / mean.seconds) if kernels else None,
                memory_peak=self._allocated + allocated_peak(self._profiler.profiler, _BOUNDARY, device),
                trace=_chrome_trace(self._profiler),
            )
        return replace(profile, advice=advise(profile, self._rows))


def _averages(profiler: TorchProfiler) -> list[FunctionEventAvg]:
    """Return torch's ``key_averages`` over the profiled steps alone, for each device."""
    events = profiler.events() or []
    marks = [event.time_range.start for event in events if event.name == _BOUNDARY]
    if len(marks) < 2:
        raise RuntimeError(_ONE)
    averages: dict[Any, FunctionEventAvg] = defaultdict(FunctionEventAvg)
    for event in events:
        if marks[0] <= event.time_range.start < marks[-1]:
            averages[event.device_type, event.key].add(event)
    return list(averages.values())


def _device_seconds(averages: Iterable[FunctionEventAvg]) -> float:
    """Return the seconds of all kernels and copies on a GPU."""
    kernels = (each for each in averages if each.device_type != DeviceType.CPU and not each.is_user_annotation)
    return 1e-6 * sum(each.self_device_time_total for each in kernels)


def _operators(
    averages: Iterable[FunctionEventAvg], steps: int, seconds: float, *, on_gpu: bool
) -> tuple[Operator, ...]:
    """Return the costliest operators, by the time of their own kernels, or without a GPU by their own time."""
    found = []
    for each in averages:
        host, device = 1e-6 * each.self_cpu_time_total / steps, 1e-6 * each.self_device_time_total / steps
        is_range = each.is_user_annotation and not device  # the kernels of a CUDA graph belong to a range
        if each.device_type == DeviceType.CPU and each.key != "[memory]" and not is_range:
            share = (device if on_gpu else host) / seconds
            found.append(Operator(str(each.key), each.count / steps, host, device, share))
    return tuple(sorted(found, key=lambda operator: (-operator.share, -operator.host_seconds))[:_OPERATORS])


def _chrome_trace(profiler: TorchProfiler) -> bytes:
    with TemporaryDirectory(prefix="flatout-profile-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return gzip.compress(file.read_bytes(), compresslevel=6)


def _make_profiler() -> TorchProfiler:
    if torch.autograd._profiler_enabled():
        raise RuntimeError(_ONE)
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return TorchProfiler(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True, profile_memory=True)


def _steps(count: int, mark: Callable[[], object] = lambda: None) -> Course:
    """Let ``count`` steps pass, and call ``mark`` before and after each."""
    mark()
    for _ in range(count):
        yield False
        mark()


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of epoch after epoch, until an epoch is empty."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch


def _ahead() -> int:
    """Return the number of batches that running loaders may have prefetched."""
    stores = [
        loader._num_workers * loader._prefetch_factor
        for loader in gc.get_objects()
        if type(loader) is _MultiProcessingDataLoaderIter
    ]
    return min(_MOST_AHEAD, max(stores, default=0) + (_AHEAD_ON_CUDA if torch.cuda.is_initialized() else 0))

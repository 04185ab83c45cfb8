"""Records training steps: warm-up, a search for syncs, then the steps that are timed."""

from __future__ import annotations

import gc
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flatout.data.machine import usable_cores
from flatout.profile.advice import advise
from flatout.profile.gaps import gaps, grouped
from flatout.profile.memory import memory
from flatout.profile.nsight import kernel_filter
from flatout.profile.operators import device_phases, operators, top_kernel
from flatout.profile.summary import PHASES, Phase, Profile, Step, Sync, TraceFile
from flatout.profile.syncs import SyncFinder, silent
from flatout.profile.trace import BOUNDARY, Trace

SEARCHED_STEPS = 2
"""Steps in which syncs are looked for, before the timed ones: watching every operator slows them down."""
_AHEAD_ON_CUDA = 2  # batches that a flatout.data.Prefetcher fetches ahead
_MOST_AHEAD = 64
_ONE = "torch has only one profiler, and flatout needs it: take the loop's own torch.profiler out"


class Course(ABC):
    """What a loop is taken through as ``boundary`` is called between its steps.

    Attributes:
        done: it is at its end.
        passed: calls of ``boundary``.
    """

    def __init__(self) -> None:
        self.done = False
        self.passed = 0
        self._course = self._run()

    @abstractmethod
    def _run(self) -> Generator[None, None, None]:
        """All of it; yields to the loop at every boundary."""

    def boundary(self) -> None:
        """Between two steps: before the first, and after every one."""
        self.passed += 1
        try:
            next(self._course)
        except StopIteration:
            self.done = True

    def close(self) -> None:
        """Ends what is under way."""
        self._course.close()


class Session(Course):
    """Takes a loop through its profile. Steps timed before ``close`` are kept.

    Args:
        steps: to time.
        warmup: steps before anything is looked at.
        verdict: for ``Profile.verdict``; asked for after the warm-up, while nothing slows the steps down.

    Attributes:
        timed: steps timed so far.
    """

    def __init__(self, steps: int, warmup: int, verdict: Callable[[], str] = str) -> None:
        super().__init__()
        self._steps = steps
        self._warmup = warmup
        self._judge = verdict
        self._verdict = ""
        self.timed = 0
        self._unprofiled: float | None = None
        self._syncs: tuple[Sync, ...] = ()
        self._trace = TraceFile()

    def profile(self, samples: float | None = None, commands: Sequence[str] = ()) -> Profile:
        """What was recorded.

        Args:
            samples: per step.
            commands: for ``Profile.commands``; ``{kernel}`` in them becomes the costliest kernel's name.

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

    def _run(self) -> Generator[None, None, None]:
        if self._warmup:
            yield
        begun = _now()
        for _ in range(self._warmup - 1):
            yield
        if self._warmup > 1:
            self._unprofiled = (_now() - begun) / (self._warmup - 1)
        self._verdict = self._judge()

        finder = SyncFinder(torch.cuda.is_initialized())
        with finder.watching():
            for _ in range(SEARCHED_STEPS):
                yield
        self._syncs = finder.syncs(SEARCHED_STEPS)

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True)
        if torch.autograd._profiler_enabled():
            raise RuntimeError(_ONE)
        profiler.prepare_trace()
        running = False
        others = _refused(profiler)
        try:
            # Loaders have run ahead in all this: what they have in store must not make them look fast.
            for _ in range(_ahead()):
                yield
            profiler.start_trace()
            running = True
            if torch.cuda.is_initialized():  # the GPU is behind the host: so it shall be when timing begins
                yield
            _mark()
            for _ in range(self._steps):
                yield
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
    stack = ExitStack()

    def guard(name: str) -> None:
        method = getattr(torch.autograd.profiler.profile, name)

        def call(self: torch.autograd.profiler.profile) -> None:
            if self is not ours.profiler:
                raise RuntimeError(_ONE)
            method(self)

        setattr(torch.autograd.profiler.profile, name, call)
        stack.callback(setattr, torch.autograd.profiler.profile, name, method)

    guard("_prepare_trace")
    guard("_start_trace")
    return stack


def summarise(
    trace: Trace,
    *,
    unprofiled_seconds: float | None = None,
    syncs: tuple[Sync, ...] = (),
    samples: float | None = None,
    commands: Sequence[str] = (),
    verdict: str = "",
    trace_file: TraceFile | None = None,
) -> Profile:
    """A profile of a trace."""
    steps = tuple(_steps(trace))
    phases: dict[Phase, float] = {
        phase: sum(step.phases.get(phase, 0.0) for step in steps) / len(steps) for phase in PHASES
    }
    seconds = sum(step.seconds for step in steps) / len(steps)
    found = grouped(trace, gaps(trace))
    costliest = operators(trace)
    return Profile(
        steps=steps,
        seconds=seconds,
        unprofiled_seconds=unprofiled_seconds,
        samples=samples,
        phases=phases,
        device_phases=device_phases(trace),
        operators=costliest,
        gaps=found,
        syncs=(*syncs, *silent(trace)),
        memory=memory(trace),
        advice=advise(trace, seconds, phases, costliest, found, syncs),
        commands=tuple(command.replace("{kernel}", kernel_filter(top_kernel(trace))) for command in commands),
        environment=_environment(),
        verdict=verdict,
        trace=trace_file,
    )


def _steps(trace: Trace) -> Iterator[Step]:
    for start, end in pairwise(trace.boundaries):
        phases = dict.fromkeys(PHASES, 0.0)
        for span in trace.divided(start, end):
            phases[span.phase] += 1e-6 * (span.end - span.start)
        yield Step(1e-6 * (end - start), phases)


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


def _environment() -> dict[str, str]:
    import flatout

    processor = platform.processor() or platform.machine()
    device = f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_initialized() else f"cpu ({processor})"
    return {
        "device": device,
        "cores": str(usable_cores()),
        "torch": torch.__version__,
        "flatout": flatout.__version__,
        "python": platform.python_version(),
    }

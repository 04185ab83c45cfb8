"""Times of steps and their parts, taken without a profiler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.profiler import record_function
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

from flatout.mfu.ranges import ranges_shown_as
from flatout.profile.events import Event, nest
from flatout.profile.parts import BACKWARD, Parts
from flatout.profile.profile_data import Step
from flatout.profile.syncs import replaced

_RANGES = ("enumerate(DataLoader)#", "Optimizer.step#", "Optimizer.zero_grad#")
"""Prefixes of the ranges that torch itself opens for parts of a step."""
_LOADING = ("enumerate(DataLoader)#", "flatout.loader_wait")
"""Prefixes of the ranges in which a loader makes a batch."""

_CALLS: tuple[tuple[Any, str, str], ...] = (
    (torch.autograd, "_engine_run_backward", f"torch/autograd/graph.py(0){BACKWARD}"),
    (GradScaler, "unscale_", "torch/amp/grad_scaler.py(0): unscale_"),
    (GradScaler, "step", "torch/amp/grad_scaler.py(0): step"),
    (GradScaler, "update", "torch/amp/grad_scaler.py(0): update"),
    (clip_grad, "_get_total_norm", "torch/nn/utils/clip_grad.py(0): _get_total_norm"),
    (clip_grad, "_clip_grads_with_norm_", "torch/nn/utils/clip_grad.py(0): _clip_grads_with_norm_"),
    (LRScheduler, "step", "torch/optim/lr_scheduler.py(0): step"),
)
"""Functions that are a part of a step: owner, attribute, and the name that torch's profiler gives their calls."""


class Clock(Protocol):
    """Clock whose readings ("marks") are converted to seconds later, when the device has reached them."""

    def mark(self) -> Any:
        """Return the present moment."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the times of marks, on one scale."""


class HostClock:
    """Clock of the host."""

    def mark(self) -> float:
        """Return the present moment."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Return the marks, which are seconds already."""
        return list(marks)


class DeviceClock:
    """Clock of a GPU: events on the stream that is current when the clock is made.

    The GPU reaches a mark after all work that was queued before. So a host that runs ahead does not shorten a step, and
    a wait that overlaps other work of the GPU takes no time.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()

    def mark(self) -> torch.cuda.Event | None:
        """Return an event; None during the capture of a CUDA graph, which must not contain the event."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event | None]) -> list[float]:
        """Wait for the GPU, and return seconds since the first mark. A mark in a capture repeats the time before."""
        torch.cuda.synchronize(self._stream.device)
        times: list[float] = []
        begun = next(mark for mark in marks if mark is not None)
        for mark in marks:
            times.append(times[-1] if mark is None else 1e-3 * begun.elapsed_time(mark))
        return times


def make_clock() -> Clock:
    """Return the GPU's clock if this process uses a GPU, else the host's."""
    return DeviceClock() if torch.cuda.is_initialized() else HostClock()


@dataclass(slots=True)
class _Span:
    """Interval of a part of a step. Start and end are numbers of marks. The end is None while the part runs."""

    name: str
    start: int
    trains: bool = False
    end: int | None = None


class PhaseTimer:
    """Recorder of the moments at which the training thread enters and leaves the parts of steps.

    flatout's runs mark their parts. In other loops, calls of the loader, the model, the backward and the optimizer show
    the parts. Events have the names that torch's profiler gives them, so ``Parts`` divides a timed step as it divides a
    profiled one. In a loop that calls no module, everything before the backward is the forward.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = make_clock() if clock is None else clock
        self._thread = threading.get_ident()
        self._marks: list[Any] = []
        self._boundaries: list[int] = []
        self._spans: list[_Span] = []
        self._ranges: dict[int, _Span] = {}
        self._within = False
        self._loading = 0

    @property
    def count(self) -> int:
        """Number of steps timed so far."""
        return max(0, len(self._boundaries) - 1)

    def boundary(self) -> None:
        """Mark the end of a step and the beginning of the next."""
        self._boundaries.append(self._mark())

    def steps(self) -> tuple[Step, ...]:
        """Return the timed steps with their parts."""
        if not self.count:
            return ()
        times = [1e6 * seconds for seconds in self._clock.seconds(self._marks)]
        boundaries = [times[number] for number in self._boundaries]
        events, trained = [], []
        for span in self._spans:
            end = boundaries[-1] if span.end is None else times[span.end]
            kind = "user_annotation" if span.name.startswith("flatout.") else "python_function"
            event = Event(span.name, kind, times[span.start], max(end, times[span.start]), 0, {})
            events.append(event)
            if span.trains:
                trained.append(event)
        events.sort(key=lambda event: (event.start, -event.end))
        nest(events)
        uploads = [event for event in events if event.name == "aten::to"]
        parts = Parts(events, trained or _forwards(events, boundaries), uploads, boundaries[-1])
        return parts.steps(boundaries)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record parts within the ``with`` block. The end of the block restores ranges and functions."""
        with ExitStack() as stack:
            stack.enter_context(ranges_shown_as(partial(_Range, self)))
            stack.enter_context(replaced(record_function, "__enter__", self._entering))
            stack.enter_context(replaced(record_function, "__exit__", self._leaving))
            for owner, attribute, name in _CALLS:
                stack.enter_context(replaced(owner, attribute, partial(self._timed, name)))
            stack.enter_context(replaced(nn.Module, "__call__", self._called))
            if torch.cuda.is_initialized():
                for attribute, always in (("to", False), ("cuda", True)):
                    stack.enter_context(replaced(Tensor, attribute, partial(self._uploading, always)))
            yield

    def begin(self, name: str) -> _Span | None:
        """Open a span; None on another thread."""
        if threading.get_ident() != self._thread:
            return None
        span = _Span(name, self._mark())
        self._spans.append(span)
        self._loading += name.startswith(_LOADING)
        return span

    def end(self, span: _Span | None) -> None:
        """Close a span that ``begin`` opened."""
        if span is not None:
            span.end = self._mark()
            self._loading -= span.name.startswith(_LOADING)

    def _mark(self) -> int:
        self._marks.append(self._clock.mark())
        return len(self._marks) - 1

    def _entering(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def enter(annotation: Any) -> Any:
            span = self.begin(annotation.name) if annotation.name.startswith(_RANGES) else None
            if span is not None:
                self._ranges[id(annotation)] = span
            return method(annotation)

        return enter

    def _leaving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def leave(annotation: Any, *exception: Any) -> Any:
            self.end(self._ranges.pop(id(annotation), None))
            return method(annotation, *exception)

        return leave

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return self._recorded(self.begin(name), name.endswith(BACKWARD), partial(function, *args, **kwargs))

        return call

    def _called(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Inner modules belong to the outer call. The recomputed forward of a checkpoint belongs to the backward.
            # Modules that a dataset calls are part of loading.
            is_inner = self._within or self._loading
            if torch.compiler.is_compiling() or is_inner or threading.get_ident() != self._thread:
                return method(module, *args, **kwargs)
            span = self.begin(f"nn.Module: {type(module).__name__}")
            assert span is not None
            is_learning = module.training and torch.is_grad_enabled()
            span.trains = is_learning and next(module.parameters(), None) is not None
            return self._recorded(span, True, partial(method, module, *args, **kwargs))

        return call

    def _uploading(self, always: bool, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            target = kwargs.get("device", args[0] if args else None)
            if torch.compiler.is_compiling() or tensor.is_cuda or not (always or is_gpu(target)):
                return method(tensor, *args, **kwargs)
            return self._recorded(self.begin("aten::to"), False, partial(method, tensor, *args, **kwargs))

        return call

    def _recorded(self, span: _Span | None, within: bool, call: Callable[[], Any]) -> Any:
        """Return the result of a call, and close ``span`` after it.

        Args:
            span: opened span of the call; None on another thread.
            within: True if modules that the call runs get no spans.
            call: the call.
        """
        if span is None:
            return call()
        outer, self._within = self._within, self._within or within
        try:
            return call()
        finally:
            self._within = outer
            self.end(span)


class _Range:
    """Range that a run opens for a part of its step."""

    def __init__(self, timer: PhaseTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._span = self._timer.begin(self._name)

    def __exit__(self, *exception: object) -> None:
        self._timer.end(self._span)


def is_gpu(target: Any) -> bool:
    """Return True if an argument of ``Tensor.to`` is a GPU, or a tensor on a GPU."""
    if isinstance(target, (str, torch.device)):
        return torch.device(target).type == "cuda"
    return isinstance(target, int) or getattr(target, "is_cuda", False)


def _forwards(events: Sequence[Event], boundaries: Sequence[float]) -> list[Event]:
    """Return a forward before each backward, starting at the last end of a loading, update, backward or step."""
    ends = list(boundaries)
    found = []
    for event in events:
        if event.name.endswith(BACKWARD):
            begun = max(end for end in ends if end <= max(boundaries[0], event.start))
            found.append(Event("forward", "cpu_op", begun, event.start, 0, {}))
        if event.name.endswith(BACKWARD) or event.name.startswith(("enumerate(DataLoader)#", "Optimizer.step#")):
            ends.append(event.end)
    return found

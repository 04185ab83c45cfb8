"""Times of steps and their phases, taken without a profiler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.profiler import record_function
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

from flatout.core.replaced import replaced
from flatout.mfu.ranges import ranges_shown_as
from flatout.profile.profile_data import PHASES, Phase, Step

_RANGES: Mapping[str, Phase] = {
    "enumerate(DataLoader)#": "loader_wait",
    "Optimizer.step#": "update",
    "Optimizer.zero_grad#": "update",
    "flatout.loader_wait": "loader_wait",
    "flatout.h2d": "h2d",
    "flatout.forward": "forward",
    "flatout.backward": "backward",
    "flatout.update": "update",
}
"""Phases by the beginnings of the names of the ranges that torch and flatout open."""

_CALLS: tuple[tuple[Any, str, Phase], ...] = (
    (torch.autograd, "_engine_run_backward", "backward"),
    (GradScaler, "unscale_", "update"),
    (GradScaler, "step", "update"),
    (GradScaler, "update", "update"),
    (clip_grad, "_get_total_norm", "update"),
    (clip_grad, "_clip_grads_with_norm_", "update"),
    (LRScheduler, "step", "update"),
)
"""Functions that are a phase of a step: owner, attribute and phase."""


class PhaseTimer:
    """Recorder of the moments at which the training thread enters and leaves the phases of steps.

    flatout's runs open a range for each phase. In other loops, calls of the loader, the model, the backward and the
    optimizer show the phases. The time between a forward and its backward is forward, because the loss is computed
    there. In a loop that calls no module, the forward begins at the end of the last batch, backward or step.

    The moments are times of the host, or with a GPU events on the current stream. The GPU reaches an event after all
    work that was queued before. So a host that runs ahead does not shorten a step, and a wait that overlaps other work
    of the GPU takes no time.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._thread = threading.get_ident()
        self._moments: list[Any] = []
        self._phases: list[Phase] = []  # phase from each moment to the next
        self._boundaries: list[int] = []  # numbers of the moments between steps
        self._open: list[Phase] = []  # innermost last
        self._ranges: set[int] = set()
        self._wait: tuple[int, int] | None = None  # moments of the last wait for a batch, whose use is not known yet
        self._has_forward = False
        self._forward = 0  # moment from which time counts as forward if a backward follows

    @property
    def count(self) -> int:
        """Number of steps timed so far."""
        return max(0, len(self._boundaries) - 1)

    def phase(self) -> Phase:
        """Return the innermost phase that the training thread is in."""
        return self._open[-1] if self._open else "host_idle"

    def boundary(self) -> None:
        """Mark the end of a step and the beginning of the next."""
        self._boundaries.append(len(self._moments))
        self._has_forward = False
        self._begin_forward()
        self._mark()

    def steps(self) -> tuple[Step, ...]:
        """Return the timed steps with their phases."""
        times, found = self._seconds(), []
        for first, last in pairwise(self._boundaries):
            phases = dict.fromkeys(PHASES, 0.0)
            for moment in range(first, last):
                phases[self._phases[moment]] += times[moment + 1] - times[moment]
            found.append(Step(times[last] - times[first], phases))
        return tuple(found)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record phases within the ``with`` block. The end of the block restores ranges and functions."""
        with ExitStack() as stack:
            stack.enter_context(ranges_shown_as(lambda name: self._within(_phase_of(name))))
            stack.enter_context(replaced(record_function, "__enter__", self._entering))
            stack.enter_context(replaced(record_function, "__exit__", self._leaving))
            phases: list[tuple[Any, str, Callable[..., Phase | None]]] = [
                *((owner, name, lambda *_, phase=phase, **__: phase) for owner, name, phase in _CALLS),
                (nn.Module, "__call__", self._phase_of_module),
            ]
            if torch.cuda.is_initialized():
                phases += [(Tensor, name, partial(_phase_of_upload, name == "cuda")) for name in ("to", "cuda")]
            for owner, name, phase_of in phases:
                stack.enter_context(replaced(owner, name, partial(self._phased, phase_of)))
            yield

    def _mark(self) -> None:
        """Record the moment at which the innermost open phase begins or continues."""
        self._moments.append(self._now())
        self._phases.append(self.phase())

    def _now(self) -> Any:
        """Return the present moment; None during the capture of a CUDA graph, which must not contain an event."""
        if self._stream is None:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _seconds(self) -> list[float]:
        """Return the times of all moments. A moment in a capture repeats the time before."""
        if self._stream is None:
            return self._moments
        torch.cuda.synchronize(self._stream.device)
        known = [moment for moment in self._moments if moment is not None]
        times = [0.0]
        for moment in self._moments:
            times.append(times[-1] if moment is None else 1e-3 * known[0].elapsed_time(moment))
        return times[1:]

    @contextmanager
    def _within(self, phase: Phase | None) -> Iterator[None]:
        """Record a phase. None, and the phases of other threads, are not recorded."""
        is_entered = self._enter(phase)
        try:
            yield
        finally:
            if is_entered:
                self._leave()

    def _enter(self, phase: Phase | None) -> bool:
        if phase is None or threading.get_ident() != self._thread:
            return False
        if phase == "backward" and "backward" not in self._open:
            self._relabel(self._forward, len(self._moments), self.phase(), "forward")
            self._has_forward = False
        elif phase == "forward":
            self._begin_forward()
            self._has_forward = True
        elif phase == "loader_wait" and "loader_wait" not in self._open:
            self._wait = len(self._moments), len(self._moments)
        self._open.append(phase)
        self._mark()
        return True

    def _leave(self) -> None:
        phase = self._open.pop()
        if phase in ("loader_wait", "backward"):
            self._begin_forward()
        if phase == "loader_wait" and phase not in self._open and self._wait is not None:
            self._wait = self._wait[0], len(self._moments)
        self._mark()

    def _begin_forward(self) -> None:
        """Let the forward begin now, unless a forward has begun that no backward has followed yet."""
        if not self._has_forward:
            self._forward = len(self._moments)

    def _relabel(self, first: int, end: int, old: Phase, new: Phase) -> None:
        self._phases[first:end] = [new if phase == old else phase for phase in self._phases[first:end]]

    def _entering(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def enter(annotation: Any) -> Any:
            if self._enter(_phase_of(annotation.name)):
                self._ranges.add(id(annotation))
            return method(annotation)

        return enter

    def _leaving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def leave(annotation: Any, *exception: Any) -> Any:
            if id(annotation) in self._ranges:
                self._ranges.remove(id(annotation))
                self._leave()
            return method(annotation, *exception)

        return leave

    def _phased(self, phase_of: Callable[..., Phase | None], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records each call as the phase that ``phase_of`` returns for the arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            phase = phase_of(*args, **kwargs)
            if phase is None:
                return function(*args, **kwargs)
            with self._within(phase):
                return function(*args, **kwargs)

        return call

    def _phase_of_module(self, module: nn.Module, *_: Any, **__: Any) -> Phase | None:
        # Inner modules belong to the outer call. The recomputed forward of a checkpoint belongs to the backward.
        # Modules that a dataset calls belong to loading. Modules without parameters compute a transform or a loss.
        is_inner = not {"loader_wait", "forward", "backward"}.isdisjoint(self._open)
        if is_inner or next(module.parameters(), None) is None:
            return None
        trains = module.training and torch.is_grad_enabled()
        if self._wait is not None:  # a batch that only evaluations use belongs to the loop's own code
            self._relabel(*self._wait, *(("host_idle", "loader_wait") if trains else ("loader_wait", "host_idle")))
            self._wait = None if trains else self._wait
        return "forward" if trains else None


def _phase_of_upload(is_upload: bool, tensor: Tensor, *args: Any, **kwargs: Any) -> Phase | None:
    target = kwargs.get("device", args[0] if args else None)
    return "h2d" if not tensor.is_cuda and (is_upload or is_gpu(target)) else None


def is_gpu(target: Any) -> bool:
    """Return True if an argument of ``Tensor.to`` is a GPU, or a tensor on a GPU."""
    if isinstance(target, (str, torch.device)):
        return torch.device(target).type == "cuda"
    return isinstance(target, int) or getattr(target, "is_cuda", False)


def _phase_of(name: str) -> Phase | None:
    return next((phase for begin, phase in _RANGES.items() if name.startswith(begin)), None)

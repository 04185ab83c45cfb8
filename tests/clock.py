"""A clock that only the job under test advances: decisions about time repeat exactly and wait for nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

TICK = 2e-4
"""Seconds between two readings of the clock, so that loops that wait for a moment end."""


class Clock:
    """Replacement of ``time.perf_counter`` that only the job advances, and each reading by a tick."""

    def __init__(self, tick: float = TICK) -> None:
        self.now = 0.0
        self._tick = tick
        self._ticked = 0.0

    def __call__(self) -> float:
        self.now += self._tick
        self._ticked += self._tick
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def core_seconds(self) -> float:
        """Return the time of all ticks: that of the work between two readings, without what was advanced."""
        return self._ticked

    def slow_down(self, model: nn.Module, seconds: float = 1.0) -> None:
        """Have each forward of a model take so long."""
        model.register_forward_hook(lambda *_: self.advance(seconds))


@contextlib.contextmanager
def simulated(clock: Clock) -> Iterator[None]:
    """Put the clock in the place of ``time.perf_counter``. Measuring the peak of the device takes no time either."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with mock.patch.object(time, "perf_counter", clock), mock.patch("flatout.mfu.peaks._SWEEP_SECONDS", 0.0):
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def simulated_time(tick: float = 0.0) -> Iterator[Clock]:
    """Replace ``time.perf_counter`` and ``time.sleep`` in this process, and in processes that are forked meanwhile."""
    clock = Clock(tick)
    with mock.patch.object(time, "perf_counter", clock), mock.patch.object(time, "sleep", clock.advance):
        yield clock


class TimedStep:
    """Loss function that advances the clock by the time of a whole step.

    Args:
        clock: is advanced by each call.
        seconds: of a step, or a function ``(samples, active) -> seconds``; ``active`` as in the property.
        loss_fn: computes the loss.
    """

    def __init__(
        self,
        clock: Clock,
        seconds: float | Callable[[int, Collection[str]], float] = 1.0,
        loss_fn: Callable[[Any, Any], Tensor] = functional.cross_entropy,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._loss_fn = loss_fn
        self._threads = torch.get_num_threads()
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._autocast = False

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TimedStep:
        """Look at a model and its optimizer for techniques that are turned on. The model has submodules.

        flatout turns autocast on inside the call of the model alone, so the first submodule is where it is seen.
        """
        self._model, self._optimizer = model, optimizer
        next(model.children()).register_forward_pre_hook(self._begins)
        return self

    def _begins(self, *_: object) -> None:
        self._autocast = torch.is_autocast_enabled("cpu")

    @property
    def active(self) -> set[str]:
        """Names of the techniques that are on, of those that change how long a step takes."""
        weights = [] if self._model is None else [p for p in self._model.parameters() if p.dim() == 4]
        found = {
            "precision": self._autocast,
            "cpu_threads": torch.get_num_threads() != self._threads,
            "fused_optimizer": type(self._optimizer).__module__.startswith("flatout"),
            "channels_last": any(not p.is_contiguous() for p in weights),
            "sdpa_backend": not torch.backends.cuda.flash_sdp_enabled(),
        }
        return {name for name, is_active in found.items() if is_active}

    def seconds(self, samples: int) -> float:
        """Return the time of a step of so many samples with what is on now."""
        return self._seconds(samples, self.active) if callable(self._seconds) else self._seconds

    def passes(self, samples: int) -> None:
        """Advance the clock by a step."""
        self._clock.advance(self.seconds(samples))

    def __call__(self, output: Any, target: Any) -> Tensor:
        self.passes(len(target))
        return self._loss_fn(output, target)


class TimedSamples(Dataset[tuple[Tensor, int]]):
    """64 samples of eight numbers and one of three classes, each of which takes time to load.

    Args:
        clock: is advanced by each sample.
        seconds: of a sample, or a function without arguments that returns them.
    """

    def __init__(self, clock: Clock, seconds: float | Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self._clock.advance(self._seconds() if callable(self._seconds) else self._seconds)
        return torch.full((8,), float(i)), i % 3

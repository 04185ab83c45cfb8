"""Simulated clock, and jobs that advance it. Decisions about time repeat exactly, and no test waits."""

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

from flatout.core.instance_class import users_class
from tests.unseen import Unseen

TICK = 2e-4
"""Seconds by which each reading advances a clock. Loops that poll the clock until a deadline therefore end."""


class Clock(Unseen):
    """Replacement of ``time.perf_counter`` that each reading advances by a tick. Trials do not set the clock back."""

    now: float

    def __init__(self, tick: float = TICK) -> None:
        super().__init__(now=0.0, tick=tick, ticked=0.0, slept=0.0)

    def __call__(self) -> float:
        self.now += self.tick
        self.ticked += self.tick
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock by the time of work."""
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        """Advance the clock by the time of sleep."""
        self.now += seconds
        self.slept += seconds

    def process_seconds(self) -> float:
        """Return the CPU time: the time of all work. Sleep adds nothing."""
        return self.now - self.slept

    def core_seconds(self) -> float:
        """Return the sum of all ticks, which stands for the work between readings. Sleep adds nothing."""
        return float(self.ticked)

    def slow_down(self, model: nn.Module, seconds: float = 1.0) -> None:
        """Advance the clock at each forward of the model."""
        model.register_forward_hook(lambda *_: self.advance(seconds))


@contextlib.contextmanager
def simulated_time(tick: float = TICK) -> Iterator[Clock]:
    """Replace the functions of ``time`` by those of a new clock, here and in processes forked in the block."""
    clock = Clock(tick)
    functions = {"perf_counter": clock, "process_time": clock.process_seconds, "sleep": clock.sleep}
    with mock.patch.multiple(time, **functions):
        yield clock


@contextlib.contextmanager
def simulated_tuning() -> Iterator[Clock]:
    """Simulate the time of ``flatout.optimize``, with two threads and a peak measurement of one product per size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with simulated_time() as clock, mock.patch("flatout.mfu.peaks._SWEEP_SECONDS", 0.0):
            yield clock
    finally:
        torch.set_num_threads(threads)


class TimedStep:
    """Loss function that advances the clock by the time of a whole step.

    Args:
        clock: the clock that each call advances.
        seconds: seconds of a step, or a function of the number of samples and the property ``active``.
        loss_fn: the function that computes the loss.
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
        """Look for active techniques in a model, which has submodules, and in its optimizer.

        The first submodule shows autocast, because flatout enables autocast only inside the call of the model.
        """
        self._model, self._optimizer = model, optimizer
        next(model.children()).register_forward_pre_hook(self._note_autocast)
        return self

    def _note_autocast(self, *_: object) -> None:
        self._autocast = torch.is_autocast_enabled("cpu")

    @property
    def active(self) -> set[str]:
        """Names of the active techniques, from those that change the time of a step."""
        layers = [] if self._model is None else [type(m) for m in self._model.modules() if isinstance(m, nn.Conv2d)]
        found = {
            "precision": self._autocast,
            "cpu_threads": torch.get_num_threads() != self._threads,
            "fused_optimizer": type(self._optimizer).__module__.startswith("flatout"),
            "channels_last": any(users_class(layer) is not layer for layer in layers),
            "sdpa_backend": not torch.backends.cuda.flash_sdp_enabled(),
        }
        return {name for name, is_active in found.items() if is_active}

    def seconds(self, samples: int) -> float:
        """Return the time of a step of ``samples`` samples with the techniques that are active now."""
        return self._seconds(samples, self.active) if callable(self._seconds) else self._seconds

    def advance_clock(self, samples: int) -> None:
        """Advance the clock by the time of a step."""
        self._clock.advance(self.seconds(samples))

    def __call__(self, output: Any, target: Any) -> Tensor:
        self.advance_clock(len(target))
        return self._loss_fn(output, target)


class TimedSamples(Dataset[tuple[Tensor, int]]):
    """Dataset of 64 samples, each of eight numbers and one of three classes, that take time to load.

    Args:
        clock: the clock that each sample advances.
        seconds: seconds of a sample, or a function without arguments that returns the seconds.
    """

    def __init__(self, clock: Clock, seconds: float | Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self._clock.advance(self._seconds() if callable(self._seconds) else self._seconds)
        return torch.full((8,), float(i)), i % 3

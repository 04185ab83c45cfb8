"""``MfuCounter``: step and phase times, throughput, stalls, MFU and HFU of a training loop, without a host sync."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from flatout.mfu.flop_count import FlopCount
from flatout.mfu.reading import Phases, Reading
from flatout.mfu.timers import use_gpu_clock
from flatout.mfu.wrapped import Calls, count_calls
from flatout.native._host import PHASES, Step, StepCounter, StepReading

Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=nn.Module)


_H2D = PHASES.index("h2d")
_NEXT_STEP = 0
"""The native core's token for the step that begins next."""


class MfuCounter:
    """Counts training steps as they run.

    On the CPU a step is timed by the host's steady clock. On a CUDA device it is timed by events on the
    current stream that are polled and never waited for, so a reading covers the steps that the device has
    finished so far. A step that is being captured into a CUDA graph is not counted; its replays are. Steps may
    overlap (threads, streams, several wrapped models): each moment counts once, so that rates are those of all of
    them together.

    Example:
        >>> counter = MfuCounter(flops_per_step=6e9, peak_flops=1e12)
        >>> for x in counter.batches([torch.ones(32, 8)]):
        ...     with counter.step(samples=len(x)) as step:
        ...         with step.phase("forward"):
        ...             loss = x.sum()
        ...         with step.phase("backward"):
        ...             pass
        >>> counter.steps, counter.samples
        (1, 32)

    Or, without touching the loop: ``model = counter.wrap(model)``.

    Args:
        flops_per_step: floating-point operations of a step: the model's alone (for MFU), or what ``count_flops`` found
            (for HFU too); None when not known, or given to each ``step``.
        peak_flops: FLOP/s that the device could reach in the precision used; None when not known.
        device: where the steps run; default: the current CUDA device if there is one, else the CPU.
        window: number of steps that the rolling figures cover.
        phases_every: phases are measured on every so many steps, 0 for never. On a GPU that this build of flatout has
            no CUDA code for they are not.

    Raises:
        ValueError: for a negative ``flops_per_step`` or ``phases_every``, a ``peak_flops`` or ``window`` that is not
            positive.
    """

    def __init__(
        self,
        flops_per_step: float | FlopCount | None = None,
        peak_flops: float | None = None,
        *,
        device: torch.device | str | None = None,
        window: int = 100,
        phases_every: int = 10,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be >= 1, got {window}")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(f"peak_flops must be > 0 and finite, or None, got {peak_flops}")
        if isinstance(flops_per_step, (int, float)) and not 0 <= flops_per_step < math.inf:
            raise ValueError(f"flops_per_step must be >= 0 and finite, or None, got {flops_per_step}")
        self.flops_per_step = flops_per_step
        self.peak_flops = peak_flops
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._core = StepCounter(window)
        if self.device.type == "cuda":
            use_gpu_clock(self._core, self.device)
        self._begin_step, self._waited = self._core.step, self._core.waited
        self.phases_every = phases_every
        self._calls: weakref.WeakSet[Calls] = weakref.WeakSet()
        self._warned = False

    @property
    def phases_every(self) -> int:
        """Phases are measured on every so many steps, beginning with the second; 0: on none."""
        return self._phases_every

    @phases_every.setter
    def phases_every(self, steps: int) -> None:
        if steps < 0:
            raise ValueError(f"phases_every must be >= 0, got {steps}")
        self._phases_every = steps
        self._core.measure_phases_every(steps)

    def step(self, samples: int = 0, tokens: int = 0, flops: float | FlopCount | None = None) -> Step:
        """Times one training step: ``with counter.step(samples=len(x)): ...``.

        A step that ends in an exception is not counted.

        Args:
            samples: samples that the step trains on.
            tokens: tokens that it trains on.
            flops: FLOPs of this step, where they differ from ``flops_per_step`` (a shorter last batch).

        Raises:
            ValueError: for negative ``samples``, ``tokens`` or ``flops``.
        """
        return self._begin_step(samples, tokens, self.flops_per_step if flops is None else flops)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches; the waits for them are timed.

        What happens before the first and behind the last batch does not count as training.
        """
        self.pause()
        iterator = None
        try:
            while True:
                begun = time.perf_counter()
                with self._core.phase(_NEXT_STEP, "loader_wait"):
                    if iterator is None:
                        iterator = iter(loader)
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        return
                self._waited(time.perf_counter() - begun)
                yield batch
        finally:
            self.pause()

    def copying(self) -> None:
        """Tells that the next batch is there, and from here to its step it is being copied to the device."""
        self._core.mark(_NEXT_STEP, _H2D)

    def waited(self, seconds: float) -> None:
        """Tells that the loop waited ``seconds`` for its loader before the next step.

        It counts as a stall only as far as the device was idle meanwhile. :meth:`batches` does it by itself.

        Raises:
            ValueError: for negative ``seconds``.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be >= 0 and finite, got {seconds}")
        self._waited(seconds)

    def pause(self) -> None:
        """The time since the last step was not training (an evaluation, a checkpoint): it counts for nothing."""
        self._core.pause()

    def wrap(self, model: Model) -> Model:
        """Counts a model's training steps from now on, in whatever loop it is trained.

        A step is a forward in train mode with gradients enabled, its backward, and the optimizer's step if one follows;
        with gradient accumulation each forward and backward is a step. (A backward that starts from nothing which is
        found in the model's output, a generator for example, shows only in the update.) Each thread's steps are its
        own.

        Samples are counted by the first dimension of the first tensor that the model gets, tokens by its elements where
        they are token ids (32- or 64-bit integers in two dimensions). Where the counter has no ``flops_per_step``, the
        FLOPs of each signature of inputs are counted once, in an eager forward and backward before its first step; not
        among several processes, where one would wait for the others.

        Give it what the loop calls: ``counter.wrap(torch.compile(model))``. ``state_dict``, copies and pickles are as
        before. What ``torch.func`` differentiates, traces and exports is not counted.

        Returns:
            The same object.

        Raises:
            TypeError: for a ``ScriptModule``, whose calls cannot be seen.
            ValueError: the model is wrapped already.
        """
        self._calls.add(count_calls(self._core, model, lambda: self.flops_per_step))
        return model

    def reset(self) -> None:
        """Forgets everything counted so far; the next step is the first again."""
        self._core.reset()

    @property
    def window(self) -> Reading:
        """The last steps: as many as ``window`` said."""
        self._settle()
        return self._reading(self._core.window())

    @property
    def total(self) -> Reading:
        """Every step since the beginning or ``reset``."""
        self._settle()
        return self._reading(self._core.total())

    @property
    def steps(self) -> int:
        """Steps finished since the beginning."""
        return self.total.steps

    @property
    def samples(self) -> int:
        """Samples trained on since the beginning."""
        return self.total.samples

    @property
    def step_seconds(self) -> float | None:
        """Median step time of the window, seconds."""
        return self.window.step_seconds

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of the window."""
        return self.window.samples_per_second

    @property
    def tokens_per_second(self) -> float | None:
        """Token throughput of the window."""
        return self.window.tokens_per_second

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s of the window."""
        return self.window.flops_per_second

    @property
    def mfu(self) -> float | None:
        """MFU of the window: 0..1, or None when FLOPs or peak are not known."""
        return self.window.mfu

    @property
    def hfu(self) -> float | None:
        """HFU of the window: 0..1, or None when hardware FLOPs or peak are not known."""
        return self.window.hfu

    @property
    def phases(self) -> Phases | None:
        """What a step's time went to, in the window."""
        return self.window.phases

    @property
    def stall_fraction(self) -> float | None:
        """Share of the window's time that the device spent waiting for the loader, 0..1."""
        return self.window.stall_fraction

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.device}: {self.window})"

    def _settle(self) -> None:
        for calls in list(self._calls):
            calls.settle()

    def _reading(self, core: StepReading) -> Reading:
        mfu, hfu = self._share(core.flops_per_second), self._share(core.hardware_flops_per_second)
        if mfu is not None and mfu > 1 and not self._warned:
            self._warned = True
            warnings.warn(f"MFU is {mfu:.2f}, more than the device can do: {_suspect(mfu, self.peak_flops)}",
                          RuntimeWarning, stacklevel=3)  # fmt: skip
        return Reading(
            steps=core.steps,
            samples=core.samples,
            tokens=core.tokens,
            seconds=core.seconds,
            step_seconds=core.step_seconds,
            samples_per_second=core.samples_per_second if core.samples else None,
            tokens_per_second=core.tokens_per_second if core.tokens else None,
            flops_per_second=core.flops_per_second,
            mfu=mfu,
            hfu=hfu,
            stall_fraction=core.stall_fraction,
            phases=Phases(*core.phases) if core.phase_steps else None,
        )

    def _share(self, flops_per_second: float | None) -> float | None:
        return None if flops_per_second is None or self.peak_flops is None else flops_per_second / self.peak_flops


def _suspect(mfu: float, peak: float | None) -> str:
    if mfu < 1.5:
        return f"peak_flops ({peak:.4g} FLOP/s) is too low: measured while the machine was busy, or at a lower clock?"
    return (
        f"is peak_flops ({peak:.4g} FLOP/s) that of another device, or of a slower precision than the one in use? "
        "Or are flops_per_step those of several steps?"
    )

"""Counter of times, throughput, stalls, MFU and HFU of a training loop, without a host synchronization."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from flatout.core.described import Described
from flatout.mfu.counted_calls import CountedCalls, count_calls
from flatout.mfu.flop_count import FlopCount
from flatout.mfu.timers import Phases, Reading, TensorCores, use_gpu_clock
from flatout.native._host import PHASES, Step, StepCounter, StepReading

Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=nn.Module)


_H2D = PHASES.index("h2d")
_NEXT_STEP = 0
"""The native core's token for the step that begins next."""


class MfuCounter(Described):
    """Counter of training steps, their times and their FLOPs.

    The host's steady clock times a step on the CPU. Events on the current stream time a step on a CUDA device. The
    counter polls these events and never waits for them, so a reading covers the steps that the device has finished.
    The capture of a step into a CUDA graph does not count, but its replays do. Steps of several threads, streams or
    wrapped models may overlap. Each moment counts once, so the rates are joint rates.

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

    ``model = counter.wrap(model)`` counts the steps of an unchanged loop.

    Args:
        flops_per_step: FLOPs of a step. A number of model FLOPs gives MFU, a result of ``count_flops`` also HFU. None
            if unknown or given to each ``step``.
        peak_flops: peak FLOP/s of the device in the precision used, or None if unknown.
        device: device of the steps. The default is the current CUDA device if there is one, else the CPU.
        window: number of steps of the rolling figures.
        phases_every: steps from one measurement of phases to the next, 0 for no measurement. Phases on a GPU require
            flatout's CUDA kernels.
        tensor_watch: function of the counter that returns the activity of the tensor cores. ``run.stats`` has one.

    Raises:
        ValueError: ``flops_per_step`` or ``phases_every`` is negative, or ``peak_flops`` or ``window`` is not positive.
    """

    def __init__(
        self,
        flops_per_step: float | FlopCount | None = None,
        peak_flops: float | None = None,
        *,
        device: torch.device | str | None = None,
        window: int = 100,
        phases_every: int = 10,
        tensor_watch: Callable[[MfuCounter], TensorCores | None] = lambda counter: None,
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
        self._calls: weakref.WeakSet[CountedCalls] = weakref.WeakSet()
        self._tensor_watch = tensor_watch

    @property
    def phases_every(self) -> int:
        """Steps from one measurement of phases to the next, from the second step on. 0 means no measurement."""
        return self._phases_every

    @phases_every.setter
    def phases_every(self, steps: int) -> None:
        if steps < 0:
            raise ValueError(f"phases_every must be >= 0, got {steps}")
        self._phases_every = steps
        self._core.measure_phases_every(steps)

    def step(self, samples: int = 0, tokens: int = 0, flops: float | FlopCount | None = None) -> Step:
        """Time one training step: ``with counter.step(samples=len(x)): ...``.

        A step that ends in an exception is not counted.

        Args:
            samples: samples that the step trains on.
            tokens: tokens that the step trains on.
            flops: FLOPs of this step if they differ from ``flops_per_step``, for example on a shorter last batch.

        Raises:
            ValueError: ``samples``, ``tokens`` or ``flops`` is negative.
        """
        return self._begin_step(samples, tokens, self.flops_per_step if flops is None else flops)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches and time the waits for them.

        Time before the first and after the last batch does not count as training.
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
        """Mark the start of the next batch's copy to the device. The copy ends with the start of the batch's step."""
        self._core.mark(_NEXT_STEP, _H2D)

    def waited(self, seconds: float) -> None:
        """Record that the loop waited ``seconds`` for its loader before the next step. :meth:`batches` calls this.

        The wait counts as a stall only while the device was idle.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be >= 0 and finite, got {seconds}")
        self._waited(seconds)

    def pause(self) -> None:
        """Exclude the time since the last step, for example an evaluation or a checkpoint."""
        self._core.pause()
        self._tensor_watch(self)  # the activity of an evaluation is not that of the steps

    def wrap(self, model: Model) -> Model:
        """Count the model's training steps from now on, in any loop.

        A step is a forward in train mode with gradients enabled, its backward, and the optimizer's step if one follows.
        With gradient accumulation, each forward and backward is a step. If the model's output hides its tensors, for
        example in a generator, only the update shows the backward. Each thread has its own steps.

        The first dimension of the model's first tensor gives the samples. If this tensor holds token ids (32- or 64-bit
        integers in two dimensions), its elements give the tokens. Without ``flops_per_step``, the counter counts the
        FLOPs of each input signature once, by an eager forward and backward before the first step. In distributed
        training ``flops_per_step`` is required, because one process would wait for the others.

        Wrap the object that the loop calls: ``counter.wrap(torch.compile(model))``. ``state_dict``, copies and pickles
        do not change. Calls inside ``torch.func`` transforms, traces and exports do not count.

        Returns:
            The same object.

        Raises:
            TypeError: ``model`` is a ``ScriptModule``, whose calls cannot be seen.
            ValueError: ``model`` is wrapped already.
        """
        self._calls.add(count_calls(self._core, model, lambda: self.flops_per_step))
        return model

    def reset(self) -> None:
        """Discard all counted steps. The next step is the first."""
        self._core.reset()

    @property
    def window(self) -> Reading:
        """Reading of the last ``window`` steps."""
        self._settle()
        return self._reading(self._core.window())

    @property
    def total(self) -> Reading:
        """Reading of all steps since the beginning or the last ``reset``."""
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
        """Median step time of the window, in seconds."""
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
        """MFU of the window, 0..1, or None if FLOPs or peak are unknown."""
        return self.window.mfu

    @property
    def hfu(self) -> float | None:
        """HFU of the window, 0..1, or None if hardware FLOPs or peak are unknown."""
        return self.window.hfu

    @property
    def phases(self) -> Phases | None:
        """Mean seconds of each phase in the window, or None if no phase was measured."""
        return self.window.phases

    @property
    def stall_fraction(self) -> float | None:
        """Share of the window's time that the device spent waiting for the loader, 0..1."""
        return self.window.stall_fraction

    @property
    def tensor_cores(self) -> TensorCores | None:
        """Activity of the tensor cores in the last steps, or None if unknown."""
        return self._tensor_watch(self)

    def _facts(self) -> dict[str, str]:
        cores = self.tensor_cores
        active = {} if cores is None else {"tensor_cores": str(cores)}
        return {**self.window._facts(), **active, "device": str(self.device)}

    def _settle(self) -> None:
        for calls in list(self._calls):
            calls.settle()

    def _reading(self, core: StepReading) -> Reading:
        mfu, hfu = self._share(core.flops_per_second), self._share(core.hardware_flops_per_second)
        if mfu is not None and mfu > 1:
            warnings.warn(
                f"MFU is {mfu:.2f}, more than the device can do: check flops_per_step, and peak_flops "
                f"({self.peak_flops:.4g} FLOP/s) for this device and precision",
                RuntimeWarning,
                stacklevel=3,
            )
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

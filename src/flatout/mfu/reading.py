"""Readings of a counter, with rates over a number of steps and the time of each phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatout.core import formatting
from flatout.core.described import Described
from flatout.native._host import PHASES


@dataclass(frozen=True, repr=False)
class Phases(Described):
    """Seconds of each phase of a step, averaged over the steps whose phases were measured.

    The phases add up to the time from the end of the previous step to the end of the step. On a CUDA device the phases
    are device time. A wait or a copy that overlaps other work of the device counts 0.

    Attributes:
        loader_wait: wait for the next batch.
        h2d: copy of the batch to the device.
        forward: forward pass and loss.
        backward: backward pass.
        update: gradient scaling, clipping, the optimizer's step.
        host_idle: remaining time, in which the host ran the loop's own code (logging, ``.item()``, Python).
    """

    loader_wait: float
    h2d: float
    forward: float
    backward: float
    update: float
    host_idle: float

    @property
    def total(self) -> float:
        """Sum of all phases."""
        return sum(getattr(self, name) for name in PHASES)

    def __str__(self) -> str:
        """Return share and time of each phase, as in ``loader wait 10.0 % 1.2 ms, ...``."""
        whole = self.total or 1.0
        shown = ((name.replace("_", " "), getattr(self, name)) for name in PHASES)
        return ", ".join(f"{name} {formatting.share(value / whole, 1)} {1e3 * value:.3g} ms" for name, value in shown)

    def _facts(self) -> dict[str, str]:
        names = sorted(PHASES, key=lambda name: getattr(self, name), reverse=True)
        return {name: f"{name} {formatting.milliseconds(1e3 * getattr(self, name))}" for name in names}


@dataclass(frozen=True)
class TensorCores:
    """Activity of a GPU's tensor cores, beside the counted FLOPs of the same time.

    Attributes:
        active: share of the time in which the tensor cores worked, 0..1, as NVML's GPM measures it.
        needed: share of the time that the counted FLOPs take at the peak, recomputation included. None if unknown.
    """

    active: float
    needed: float | None

    def __str__(self) -> str:
        return f"tensor cores active {formatting.share(self.active, 1)}"


_TOLD: dict[str, Callable[[float], str]] = {
    "step_seconds": lambda value: f"{formatting.milliseconds(1e3 * value)} a step",
    "samples_per_second": lambda value: f"{formatting.count(value)} samples/s",
    "tokens_per_second": lambda value: f"{formatting.count(value)} tokens/s",
    "flops_per_second": lambda value: f"{1e-12 * value:.3g} TFLOP/s",
    "mfu": lambda value: f"MFU {formatting.share(value, 1)}",
    "hfu": lambda value: f"HFU {formatting.share(value, 1)}",
    "stall_fraction": lambda value: f"stall {formatting.share(value, 1)}",
}


@dataclass(frozen=True, repr=False)
class Reading(Described):
    """Rates over a number of steps. An unknown rate is None.

    The time of a step begins with the end of the previous step, so the loop's own work counts.
    :meth:`MfuCounter.pause` excludes time that is not training.

    Attributes:
        steps: number of steps.
        samples: samples of these steps.
        tokens: tokens of these steps.
        seconds: time of the steps and of the pauses between them. If two steps overlap, their common time counts once.
        step_seconds: time of one step from its beginning to its end, as the median over a window or the mean over a
            total.
        samples_per_second: samples / seconds, or None if the steps have no samples.
        tokens_per_second: tokens / seconds, or None if the steps have no tokens.
        flops_per_second: FLOPs / seconds, over the steps whose FLOPs are known.
        mfu: flops_per_second / peak_flops, after Chowdhery et al., "PaLM" (2022), appendix B.
        hfu: as ``mfu``, for all FLOPs that the hardware computes, including recomputation by activation checkpointing.
        stall_fraction: share of ``seconds`` in which the device was idle and waited for the loader.
        phases: mean seconds of each phase, or None if no phase was measured.
    """

    steps: int
    samples: int
    tokens: int
    seconds: float
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    flops_per_second: float | None
    mfu: float | None
    hfu: float | None
    stall_fraction: float | None
    phases: Phases | None

    def __str__(self) -> str:
        """Return all known rates in one line.

        An example is ``100 steps, 12.3 ms a step, 5,201 samples/s, MFU 41.0 %, stall 1.2 %``.
        """
        return ", ".join(self._facts().values())

    def _facts(self) -> dict[str, str]:
        return {"steps": formatting.counted(self.steps, "step"), **self.told()}

    def told(self) -> dict[str, str]:
        """Return the known rates in words, by attribute. ``hfu`` is included only if it differs from ``mfu``."""
        known = {name: getattr(self, name) for name in _TOLD if name != "hfu" or self.hfu != self.mfu}
        return {name: _TOLD[name](value) for name, value in known.items() if value is not None}

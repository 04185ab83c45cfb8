"""Readings of a counter: rates over a number of steps and the time of each phase."""

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
    are device time: a wait or a copy that overlaps other work of the device takes none.

    Attributes:
        loader_wait: the next batch was not there yet.
        h2d: the batch was being copied to the device.
        forward: forward pass and loss.
        backward: backward pass.
        update: gradient scaling, clipping, the optimizer's step.
        host_idle: the rest: between these the host ran the loop's own code (logging, ``.item()``, Python).
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
        """Share and time of each: ``loader wait 10.0 % 1.2 ms, ...``."""
        whole = self.total or 1.0
        shown = ((name.replace("_", " "), getattr(self, name)) for name in PHASES)
        return ", ".join(f"{name} {formatting.share(value / whole, 1)} {1e3 * value:.3g} ms" for name, value in shown)

    def _facts(self) -> dict[str, str]:
        names = sorted(PHASES, key=lambda name: getattr(self, name), reverse=True)
        return {name: f"{name} {formatting.milliseconds(1e3 * getattr(self, name))}" for name in names}


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
        samples: their samples.
        tokens: their tokens.
        seconds: steps and the time before each; where steps overlap it counts once.
        step_seconds: one step from its beginning to its end: the median over a window, the mean over a total.
        samples_per_second: samples / seconds; None when no samples were told.
        tokens_per_second: tokens / seconds; None when no tokens were told.
        flops_per_second: FLOPs / seconds, over the steps whose FLOPs are known.
        mfu: flops_per_second / peak_flops, after Chowdhery et al., "PaLM" (2022), appendix B.
        hfu: the same of all that the hardware computed, what activation checkpointing computes again included.
        stall_fraction: share of ``seconds`` in which the device had nothing to do but wait for the loader.
        phases: what the time of a step went to; None when no phase was named.
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
        """What is known, in one line: ``100 steps, 12.3 ms a step, 5,201 samples/s, MFU 41.0 %, stall 1.2 %``."""
        return ", ".join(self._facts().values())

    def _facts(self) -> dict[str, str]:
        return {"steps": formatting.counted(self.steps, "step"), **self.told()}

    def told(self) -> dict[str, str]:
        """Return the known rates in words, by attribute. ``hfu`` is included only if it differs from ``mfu``."""
        known = {name: getattr(self, name) for name in _TOLD if name != "hfu" or self.hfu != self.mfu}
        return {name: _TOLD[name](value) for name, value in known.items() if value is not None}

"""Comparison of an MFU with the usual MFU of similar models, and the limit of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.core import formatting
from flatout.core.described import Described
from flatout.mfu.reading import Phases

Bottleneck = Literal["loader", "copy", "own code", "clocks", "launch", "kernels", "none", "unknown"]
"""Kind of limit.

- ``loader``: the device waits for batches.
- ``copy``: batches are copied to the device.
- ``own code``: the host runs the loop's own Python code.
- ``clocks``: the GPU lowers its clocks.
- ``launch``: kernels run faster than they are launched.
- ``kernels``: kernels are small or memory-bound.
- ``none``: the MFU is in the usual range, or above.
- ``unknown``: nothing was measured.
"""

WORTH_TELLING = 0.1
"""Smallest share of a step's time that counts as a limit."""


@dataclass(frozen=True)
class Family:
    """Family of models with the same kind of limit.

    Attributes:
        name: name of the family, plural.
        usual: range of MFU, 0..1, that good training code reaches with such models on GPUs. None if no figure was
            published.
        source: source of ``usual``.
    """

    name: str
    usual: tuple[float, float] | None = None
    source: str = ""


TRANSFORMER = Family("transformers", (0.40, 0.60), "PaLM, 2022: 46 %; llm-foundry, MPT-7B: 46 to 64 %")
CONVOLUTIONAL = Family(
    "convolutional nets", (0.19, 0.42), "ResNet-50, mixed precision: NVIDIA, A100 19 %; timm, RTX 3090 42 %"
)
RECURRENT = Family("recurrent nets")
DENSE = Family("models of this kind")

_KINDS = (
    (CONVOLUTIONAL, ("conv",)),
    (RECURRENT, ("lstm", "gru", "rnn")),
    (TRANSFORMER, ("attention", "bmm")),
)


def family_of(by_op: Mapping[str, int]) -> Family:
    """Return the family of a model by its operators.

    A model is convolutional or recurrent if such operators have more than half of the FLOPs. Otherwise a model with
    any attention is a transformer.

    Args:
        by_op: FLOPs by operator, as in ``FlopCount``.
    """
    whole = sum(by_op.values()) or 1
    for family, marks in _KINDS:
        share = sum(flops for name, flops in by_op.items() if any(mark in name for mark in marks)) / whole
        if share > (0 if family is TRANSFORMER else 0.5):
            return family
    return DENSE


@dataclass(frozen=True, repr=False)
class Verdict(Described):
    """Utilization of the device by a training, and its limit.

    Attributes:
        mfu: model FLOPs utilization, 0..1, or None if unknown.
        peak: name of the peak that ``mfu`` is relative to.
        family: models to compare the MFU with.
        utilization: utilization as NVML measures it, 0..1, which is the share of time in which any kernel ran. None
            without a GPU.
        limit: sentence about the limit of the MFU.
        bottleneck: kind of the limit.
        remedies: techniques against the limit that were not tried, each with the argument that tries it.
    """

    mfu: float | None
    peak: str
    family: Family
    utilization: float | None
    limit: str
    bottleneck: Bottleneck = "unknown"
    remedies: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.mfu is not None:
            compared = ""
            if self.utilization is not None and self.family.usual is not None:
                low, high = self.family.usual
                compared = (
                    f"; {self.family.name} usually reach {100 * low:.0f} to {100 * high:.0f} % ({self.family.source})"
                )
            parts.append(f"MFU {formatting.share(self.mfu, 1)} of {self.peak}{compared}")
        if self.utilization is not None:
            parts.append(
                f"NVML reports {formatting.share(self.utilization, 0)} utilization, "
                "which is the share of time in which any kernel ran"
            )
        parts.append(self.limit)
        if self.remedies:
            parts.append(f"Not tried: {', '.join(self.remedies)}")
        return " ".join(f"{formatting.capital(part)}." for part in parts if part)

    def _facts(self) -> dict[str, str]:
        return {
            "limit": self.limit,
            "mfu": "" if self.mfu is None else f"MFU {formatting.share(self.mfu, 1)} of {self.peak}",
            "utilization": "" if self.utilization is None else f"NVML {formatting.share(self.utilization, 0)}",
            "remedies": f"not tried: {', '.join(self.remedies)}" if self.remedies else "",
        }


def judge(
    mfu: float | None,
    peak: str,
    family: Family,
    *,
    stall_fraction: float | None = None,
    phases: Phases | None = None,
    utilization: float | None = None,
    throttle: Sequence[str] = (),
) -> Verdict:
    """Compare an MFU with the usual MFU, and name the limit.

    Args:
        mfu: model FLOPs utilization, 0..1, or None if unknown.
        peak: name of the peak that ``mfu`` is relative to, such as ``"the data sheet's peak in bf16"``.
        family: family of the model, see :func:`family_of`.
        stall_fraction: share of the time in which the device waited for the loader, 0..1.
        phases: seconds of each phase of a step.
        utilization: utilization as NVML measures it, 0..1, or None without a GPU.
        throttle: reasons for lower clocks of the GPU, in words.
    """
    bottleneck, limit = _limit(mfu, family, stall_fraction, phases, utilization, throttle)
    return Verdict(mfu, peak, family, utilization, limit, bottleneck)


def _limit(
    mfu: float | None,
    family: Family,
    stall_fraction: float | None,
    phases: Phases | None,
    utilization: float | None,
    throttle: Sequence[str],
) -> tuple[Bottleneck, str]:
    outside: dict[Bottleneck, float] = {"loader": stall_fraction or 0.0}
    if phases is not None and phases.total > 0:
        seconds: dict[Bottleneck, float]
        seconds = {"loader": phases.loader_wait, "copy": phases.h2d, "own code": phases.host_idle}
        outside = {name: spent / phases.total for name, spent in seconds.items()}
    largest = max(outside, key=lambda name: outside[name])
    if outside[largest] >= WORTH_TELLING:
        return largest, f"{formatting.share(outside[largest], 0)} of the time goes to {_OUTSIDE[largest]}"
    if throttle:
        return "clocks", f"the GPU's clocks are held down: {', '.join(throttle)}"
    if utilization is not None and utilization < 1 - WORTH_TELLING:
        return "launch", "the GPU waits for kernels to be launched"
    if mfu is None:
        return "unknown", ""
    if family.usual is not None and mfu >= family.usual[0]:
        return "none", "nothing stands out"
    return "kernels", "limit: memory-bound or small kernels"


_OUTSIDE: Mapping[Bottleneck, str] = {
    "loader": "waiting for the loader",
    "copy": "copying batches to the device",
    "own code": "the loop's own Python code",
}

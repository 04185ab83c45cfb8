"""Comparison of an MFU with the usual MFU of similar models, and the limit of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.core import formatting
from flatout.core.described import Described
from flatout.mfu.timers import Phases, TensorCores

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

WIDE_GAP = 1.6
"""Factor between activity of tensor cores and counted FLOPs from which the count is doubtful.

Wrong counts are wrong by a factor of two or more: a multiply-add that counts once, a forward without its backward, a
peak with sparsity. In a right count, the activity times the clock is the MFU, within 2 percentage points after a
correction for partial tiles ("Instant GPU Efficiency Visibility at Fleet Scale", arXiv:2605.20799). For low clocks and
partial tiles together, 1.3 is an estimate. The limit is the geometric mean of 1.3 and 2. Shares below ``WORTH_TELLING``
are not compared, because products smaller than a tile are mostly padding.
"""


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
        of_measured: ``mfu`` relative to the fastest matrix product that was measured on the device, or None if unknown.
        tensor_cores: activity of the tensor cores, or None if unknown.
    """

    mfu: float | None
    peak: str
    family: Family
    utilization: float | None
    limit: str
    bottleneck: Bottleneck = "unknown"
    remedies: tuple[str, ...] = ()
    of_measured: float | None = None
    tensor_cores: TensorCores | None = None

    @property
    def doubt(self) -> str:
        """Sentence about a count that does not fit the activity of the tensor cores. Empty if there is no doubt."""
        cores = self.tensor_cores
        if cores is None or cores.needed is None:
            return ""
        low, high = sorted((cores.active, cores.needed))
        if high < WORTH_TELLING or high < WIDE_GAP * low:
            return ""
        wrong = ("low", "high") if cores.active > cores.needed else ("high", "low")
        return (
            f"at the peak, the counted FLOPs take {formatting.share(cores.needed, 1)} of the time, so the count is too "
            f"{wrong[0]} or the peak too {wrong[1]}"
        )

    def __str__(self) -> str:
        parts = []
        if self.mfu is not None:
            compared = ""
            if self.utilization is not None and self.family.usual is not None:
                low, high = self.family.usual
                compared = (
                    f"; {self.family.name} usually reach {100 * low:.0f} to {100 * high:.0f} % ({self.family.source})"
                )
            parts.append(f"{self._share()}{compared}")
        if self.tensor_cores is not None:
            parts += [str(self.tensor_cores), self.doubt]
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
            "mfu": "" if self.mfu is None else self._share(),
            "tensor_cores": "" if self.tensor_cores is None else str(self.tensor_cores),
            "doubt": self.doubt,
            "utilization": "" if self.utilization is None else f"NVML {formatting.share(self.utilization, 0)}",
            "remedies": f"not tried: {', '.join(self.remedies)}" if self.remedies else "",
        }

    def _share(self) -> str:
        """Return the MFU with the peaks that it is relative to."""
        known = (self.mfu, self.peak), (self.of_measured, "the fastest matrix product here")
        return "MFU " + ", ".join(f"{formatting.share(mfu, 1)} of {peak}" for mfu, peak in known if mfu is not None)


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
    outside: dict[Bottleneck, float] = {"loader": stall_fraction or 0.0}
    if phases is not None and phases.total > 0:
        seconds: dict[Bottleneck, float]
        seconds = {"loader": phases.loader_wait, "copy": phases.h2d, "own code": phases.host_idle}
        outside = {name: spent / phases.total for name, spent in seconds.items()}
    bottleneck, limit = max(outside, key=lambda name: outside[name]), ""
    if outside[bottleneck] >= WORTH_TELLING:
        limit = f"{formatting.share(outside[bottleneck], 0)} of the time goes to {_OUTSIDE[bottleneck]}"
    elif throttle:
        bottleneck, limit = "clocks", f"the GPU's clocks are held down: {', '.join(throttle)}"
    elif utilization is not None and utilization < 1 - WORTH_TELLING:
        bottleneck, limit = "launch", "the GPU waits for kernels to be launched"
    elif mfu is None:
        bottleneck = "unknown"
    elif family.usual is not None and mfu >= family.usual[0]:
        bottleneck, limit = "none", "nothing stands out"
    else:
        bottleneck, limit = "kernels", "limit: memory-bound or small kernels"
    return Verdict(mfu, peak, family, utilization, limit, bottleneck)


_OUTSIDE: Mapping[Bottleneck, str] = {
    "loader": "waiting for the loader",
    "copy": "copying batches to the device",
    "own code": "the loop's own Python code",
}

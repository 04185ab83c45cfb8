"""FLOPs of a training step, and the peak that MFU refers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from flatout.core.snapshot import Snapshot
from flatout.mfu.flop_count import CountedWork, FlopCount, count_flops
from flatout.mfu.peaks import Products, measured_peak_flops, multiplies_in_tf32, peak_flops
from flatout.mfu.verdict import CONVOLUTIONAL, DENSE, RECURRENT, Family, family_of
from flatout.training.autocast import autocast_dtype
from flatout.training.objective import Objective
from flatout.training.spec import Spec

_PRODUCTS: Mapping[Family, Products] = {CONVOLUTIONAL: "conv", RECURRENT: "rnn"}
"""Kind of most products, by family of models. The default is "matmul"."""


class Peak(NamedTuple):
    """Peak that MFU refers to.

    Attributes:
        flops: peak in FLOP/s, or None if unknown.
        source: name of the peak.
        measured: result of an earlier ``measured_peak_flops`` on the GPU, or None.
        on_tensor_cores: True if tensor cores compute products in this precision.
    """

    flops: float | None
    source: str
    measured: float | None = None
    on_tensor_cores: bool = False


def counted_work(objective: Objective) -> CountedWork:
    """Return a function ``work(batch)`` that counts samples, tokens and FLOPs.

    The FLOPs are the sum over forward, loss and backward.
    """
    return CountedWork(lambda batch: _count(objective, batch))


def share_of_flops(work: CountedWork, module: str) -> float | None:
    """Return the share of a step's FLOPs, 0..1, that one of the model's modules takes, or None if unknown.

    Args:
        work: the counts of ``counted_work``.
        module: name in ``model.named_modules()``.
    """
    for count in work.counts[:1]:
        try:
            return count.by_module[f"parts.0.{module}"].total / max(1, count.total)
        except KeyError:  # the module is counted under another name
            return None
    return None


def peak_of(spec: Spec, work: CountedWork, *, seconds: float = 0.0) -> Peak:
    """Return the peak that MFU refers to, in the precision of the model's products.

    Args:
        spec: model and device.
        work: counts of the job. The kind of products with most of the FLOPs decides which TF32 setting applies.
        seconds: limit of the measurement of a CPU, which has no data sheet. 0 allows no measurement.
    """
    real = (p.dtype for p in spec.model.parameters() if p.is_floating_point())
    dtype = autocast_dtype(spec.model) or next(real, torch.float32)  # a complex product consists of float32 products
    if spec.device.type != "cuda":
        peak = measured_peak_flops(spec.device, dtype, measure=seconds > 0, seconds=seconds)
        return Peak(peak, f"the fastest matrix product here in {_short(dtype)}")
    family = family_of(work.counts[0].by_op) if work.counts else DENSE
    tf32 = dtype is torch.float32 and multiplies_in_tf32(spec.device, _PRODUCTS.get(family, "matmul"))
    peak = peak_flops(spec.device, "tf32" if tf32 else dtype)
    is_comparable = peak is not None and tf32 == (dtype is torch.float32 and multiplies_in_tf32(spec.device))
    return Peak(
        peak,
        f"the data sheet's peak in {'tf32' if tf32 else _short(dtype)}",
        measured_peak_flops(spec.device, dtype, measure=False) if is_comparable else None,
        tf32 or dtype in (torch.float16, torch.bfloat16),
    )


def _count(objective: Objective, batch: Any) -> FlopCount | None:
    """Count FLOPs with the user's model and loss, also during training, and restore all state that changes.

    The objective learns what the forward changes in Python.

    Returns:
        The count; None if the step cannot be repeated without a trace.
    """
    spec = objective.spec
    state = Snapshot.capture([], code=spec.code)
    if objective.why_untried or state.why_not_repeated:
        return None
    with state.guarded(), state.extended():
        try:
            count = count_flops(_Forward(objective), batch, backward=not spec.inference)
            objective.python_state = objective.python_state or state.changed()  # an earlier forward has filled caches
            return count
        finally:
            state.restore()


class _Forward(nn.Module):
    """Forward and loss as a module, with all modules that have parameters or buffers as submodules."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self._objective = objective
        self.parts = nn.ModuleList(objective.spec.modules)

    def forward(self, batch: Any) -> Any:
        objective = self._objective
        return objective.infer(batch) if objective.spec.inference else objective.loss(batch)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype)[6:])

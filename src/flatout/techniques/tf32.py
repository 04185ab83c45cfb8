"""Additional technique: float32 matrix products on tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flatout.core.saved import Saved
from flatout.core.snapshot import process_flag
from flatout.mfu.peaks import TF32_CAPABILITY, multiplies_in_tf32
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate, ChangeCandidate
from flatout.training.autocast import autocast_dtype

if TYPE_CHECKING:
    from flatout.training.job import Job


@process_flag
def float32_precision() -> Saved:
    """Return the part for the precision of float32 matrix products.

    torch stores the precision twice: in the older ``get_float32_matmul_precision``, and in a newer flag for each
    backend. If only the newer flag is written, readers of the older one raise, for example torch.compile (pytorch
    #166387). A write to the older one sets both. A value that has not changed is not written.
    """

    def read() -> tuple[str | None, list[tuple[Any, str, str]]]:
        return _legacy_precision(), [(m, m.fp32_precision, _own(m, parent)) for m, parent in _products()]

    def write(value: tuple[str | None, list[tuple[Any, str, str]]]) -> None:
        legacy, flags = value
        if legacy is not None and _legacy_precision() != legacy:
            torch.set_float32_matmul_precision(legacy)
        for module, effective, own in flags:
            if module.fp32_precision != effective:
                module.fp32_precision = own

    return Saved(read, write)


def _products() -> list[tuple[Any, Any]]:
    """Return the holders of the flags of matrix products on CUDA and on the CPU, each with its parent."""
    backends: Any = torch.backends
    return [(backends.cuda.matmul, backends.cudnn), (backends.mkldnn.matmul, backends.mkldnn)]


def _own(module: Any, parent: Any) -> str:
    """Return the flag to write for the same precision.

    The flag is "none" if the value equals the parent's, because a read does not distinguish the two.
    """
    return "none" if module.fp32_precision == parent.fp32_precision else module.fp32_precision


def _legacy_precision() -> str | None:
    """Return the older setting; None if the user has set the newer flags, because torch then raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def tf32_on() -> Callable[[], None]:
    """Turn on TF32 for matrix products, and return the function that restores the earlier precision.

    If torch's older flag is "highest", this flag is written, which also sets the newer one. Otherwise, only the newer
    flag is written.
    """
    before = float32_precision()
    if _legacy_precision() == "highest":
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    return before.restore


class Tf32(StepTechnique):
    """Lets the GPU's matrix units (tensor cores) multiply float32 matrices, rounded to 10 bits of mantissa.

    When it helps: models that compute in float32 on Ampere and newer. A product of 10240 x 10240 matrices takes 0.016 s
    on an A100 instead of 0.11 (torch's notes on CUDA semantics; pytorch #63951). When it hurts: computations that need
    float32's last digits, such as products of orthogonal matrices and long chains. The loss trajectory is compared
    before the technique is kept. It follows mixed precision, which leaves no float32 products.

    torch computes cuDNN's convolutions and RNNs in TF32 by default. If the user has turned that off, or set the
    precision of products in any of torch's flags, this choice stays. ``techniques={"tf32": True}`` and
    ``precision="tf32"`` override it for matrix products.

    Source: PyTorch's notes on CUDA semantics, "TensorFloat-32 (TF32) on Ampere (and later) devices".
    """

    name = "tf32"
    title = "TF32"
    rationale = "the GPU's matrix units multiply float32 matrices; losses match those without TF32 within tolerance"
    is_combinable = True
    recompiles = True
    alternative_to = "precision"
    expected = "up to 7× on matrix products"
    optimistic_gain = 8.0

    def check(self, job: Job) -> None:
        """Require a GPU with TF32 tensor cores, and float32 products."""
        if job.spec.device.type != "cuda":
            raise NotApplicable("training runs on the CPU, which has no TF32")
        if torch.cuda.get_device_capability(job.spec.device) < TF32_CAPABILITY:
            raise NotApplicable("this GPU is older than Ampere: its tensor cores do not multiply float32")
        dtype = autocast_dtype(job.spec.model)
        if dtype is not None:
            raise NotApplicable(f"the model multiplies in {str(dtype).removeprefix('torch.')}, not in float32")
        if not any(p.dtype is torch.float32 for p in job.spec.model.parameters()):
            raise NotApplicable("the model has no float32 parameters, and so no float32 products to speed up")
        if multiplies_in_tf32(job.spec.device):
            raise NotApplicable("TF32 is on already, and stays on")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the one candidate, unless the user has set the precision of products."""
        chosen = _chosen_by_hand()
        if chosen:
            raise NotApplicable(f"{chosen} was set by hand: float32 products keep the precision asked for")
        return [ChangeCandidate("tf32", True, tf32_on)]

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate. A forced technique replaces a precision that the user has set."""
        return ChangeCandidate("tf32", True, tf32_on)

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if TF32 is already on, on a GPU that has it."""
        return multiplies_in_tf32(job.spec.device)


def _chosen_by_hand() -> str:
    """Return the first flag about float32 products that differs from torch's default; empty if none does."""
    backends: Any = torch.backends
    at_start = {
        "fp32_precision": (backends.fp32_precision, "none"),
        "cudnn.fp32_precision": (backends.cudnn.fp32_precision, "none"),
        "cudnn.conv.fp32_precision": (backends.cudnn.conv.fp32_precision, "tf32"),
        "cudnn.rnn.fp32_precision": (backends.cudnn.rnn.fp32_precision, "tf32"),
        "cuda.matmul.fp32_precision": (backends.cuda.matmul.fp32_precision, "none"),
    }
    changed = (f"torch.backends.{name} = {now!r}" for name, (now, start) in at_start.items() if now != start)
    return next(changed, "")

"""Additional technique: the kernel that computes attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.saved import Saved
from flatout.core.snapshot import process_flag
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

_SERVES = {
    "flash": cuda.can_use_flash_attention,
    "mem_efficient": cuda.can_use_efficient_attention,
    "cudnn": cuda.can_use_cudnn_attention,
}

_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "mem_efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
}


UNUSED = "no step calls torch's fused attention (scaled_dot_product_attention)"


SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
"""Kernels of ``scaled_dot_product_attention``, as the functions of ``torch.backends.cuda`` name them."""

TORCHS_ATTENTION = (True, True, True, True, [1, 2, 0, 3, 4])
"""Default value of ``attention_kernels()`` in torch 2.14."""


def attention_kernels() -> tuple[bool, bool, bool, bool, list[int]]:
    """Return which of ``SDP_KERNELS`` are enabled, and their order, in half a microsecond."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
    )


@process_flag
def saved_attention() -> Saved:
    """Return the part for the choice of kernels for ``scaled_dot_product_attention``, and their order on CUDA."""

    def write(value: tuple[bool, bool, bool, bool, list[int]]) -> None:
        *enabled, order = value
        for name, is_enabled in zip(SDP_KERNELS, enabled, strict=True):
            getattr(cuda, f"enable_{name}_sdp")(is_enabled)
        torch._C._set_sdp_priority_order(order)

    return Saved(attention_kernels, write)


def attention_candidate(kernel: str, device_type: str) -> Candidate:
    """Return the candidate that makes ``scaled_dot_product_attention`` prefer one kernel.

    On CUDA this changes the order, so inputs that the kernel does not support fall back to the other kernels. The CPU
    has two kernels without an order, so its fused kernel is turned off in favor of plain products.
    """

    def change() -> Callable[[], None]:
        before = saved_attention()
        if device_type == "cpu":
            cuda.enable_flash_sdp(kernel == "flash")
        else:
            getattr(cuda, f"enable_{kernel}_sdp")(True)
            first = int(KERNELS[kernel])  # type: ignore[call-overload]
            others = [each for each in torch._C._get_sdp_priority_order() if each != first]
            torch._C._set_sdp_priority_order([first, *others])
        return before.restore

    return ChangeCandidate(kernel, kernel, change)


class _Attention(TorchDispatchMode):
    """Dispatch mode that records the kernels that compute attention, and other kernels that support the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # inference mode chooses the kernel only here
            with self:
                return func.decompose(*args, **(kwargs or {}))
        kernel = _OPERATORS.get(func._schema.name)
        if kernel is not None:
            names = [argument.name for argument in func._schema.arguments]
            self._note(kernel, dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, kernel: str, call: dict[str, Any]) -> None:
        self.used.add(kernel)
        if call["query"].device.type == "cuda":
            mask = call.get("attn_bias")
            rest = call.get("dropout_p", 0.0), call.get("is_causal", False), False
            inputs = cuda.SDPAParams(call["query"], call["key"], call["value"], mask, *rest)
            self.others.update(name for name, serves in _SERVES.items() if serves(inputs))


class SdpaBackend(StepTechnique):
    """Tries each kernel that torch has for the model's attention (``scaled_dot_product_attention``).

    torch tries its kernels in a fixed order, flash attention first. When it helps: on Hopper cuDNN's kernel is 1.7 to
    2.3 times as fast as flash attention for training shapes. On Ampere and Blackwell it is slower (measured in
    transformers #48163), so only a measurement can decide. When it hurts: another kernel rounds in another order and
    draws other numbers for dropout, so the loss trajectory is compared. Plain products ("math") store the scores,
    quadratic in the length of the sequence. They are tried only if the trial's batches have one shape.

    The technique precedes compilation, because a compiled model keeps its attention kernels.

    Source: transformers #48163; pytorch's documentation of ``torch.nn.attention.sdpa_kernel``.
    """

    name = "sdpa_backend"
    title = "SDPA backend"
    rationale = "attention runs in the kernel that is fastest for the model's shapes"
    is_combinable = True
    expected = "1.7 to 2.3× on attention on Hopper"
    effect = "reseeded"
    values = f"one of {', '.join(map(repr, KERNELS))}"

    def check(self, job: Job) -> None:
        """Require a step that calls fused attention, by its counted operators."""
        if isinstance(job.spec.model, torch._dynamo.OptimizedModule) or job.spec.model._compiled_call_impl is not None:
            raise NotApplicable("the model comes compiled already, with the attention kernels that were chosen then")
        if job.work.counts and not any("attention" in name for count in job.work.counts for name in count.by_op):
            raise NotApplicable(UNUSED)

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the kernels that support the model's attention, except for the one in use.

        The method observes one forward.
        """
        seen = self._watch(job)
        if not seen.used:
            raise NotApplicable(UNUSED)
        others = seen.others | (set() if job.data.varies else {"math"})
        if len(seen.used) == 1:
            others -= seen.used
        if not others:
            raise NotApplicable("no other kernel can be trusted with this model's attention")
        return [attention_candidate(name, job.spec.device.type) for name in KERNELS if name in others]

    def accepts(self, value: Any) -> bool:
        """Accept the name of a kernel."""
        return isinstance(value, str) and value in KERNELS

    def check_value(self, job: Job, value: Any) -> None:
        """Reject a kernel that the device does not have."""
        super().check_value(job, value)
        kernels = [*KERNELS] if job.spec.device.type == "cuda" else ["flash", "math"]
        if value not in kernels:
            names = ", ".join(map(repr, kernels))
            raise ValueError(f"techniques['{self.name}'] must be one of {names} or False, got {value!r}")

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a kernel. A fused kernel must support the model's attention."""
        candidate = attention_candidate(value, job.spec.device.type)
        if job.data.batches and value != "math":
            with candidate:
                used = self._watch(job).used
            if value not in used:
                names = " and ".join(sorted(used)) or "math"
                raise NotApplicable(f"the kernel does not support this model's attention, which runs in {names}")
        return candidate

    @staticmethod
    def _watch(job: Job) -> _Attention:
        with _Attention() as seen:
            if job.spec.inference:
                job.objective.infer(job.data.batches[0])
            else:
                job.objective.loss(job.data.batches[0])
        return seen

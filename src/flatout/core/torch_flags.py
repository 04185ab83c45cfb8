"""Process-wide switches of torch's that techniques turn, captured as they are and put back exactly."""

from __future__ import annotations

from typing import Any

import torch

SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
"""Kernels of ``scaled_dot_product_attention``, as the functions of ``torch.backends.cuda`` name them."""


class Float32Precision:
    """How float32 matrix products are computed, as it is now.

    torch keeps it twice: in the older ``get_float32_matmul_precision``, and in a newer flag for each backend. Writing
    the newer one alone makes every reader of the older raise (torch.compile is one: pytorch #166387); writing the
    older one writes both.

    Attributes:
        legacy: "highest", "high" or "medium"; None where only the newer flags tell it.
    """

    def __init__(self) -> None:
        self.legacy = _legacy_precision()
        self._flags = [(module, module.fp32_precision, _own(module, parent)) for module, parent in _products()]

    def restore(self) -> None:
        """Put both back; what has not changed is not written."""
        if self.legacy is not None and _legacy_precision() != self.legacy:
            torch.set_float32_matmul_precision(self.legacy)
        for module, effective, own in self._flags:
            if module.fp32_precision != effective:
                module.fp32_precision = own


def _products() -> list[tuple[Any, Any]]:
    """What holds the flag of matrix products on CUDA and on the CPU, each with what holds the flag behind it."""
    backends: Any = torch.backends
    return [(backends.cuda.matmul, backends.cudnn), (backends.mkldnn.matmul, backends.mkldnn)]


def _own(module: Any, parent: Any) -> str:
    """The flag to write for the same precision: "none" where it is the parent's, which reading does not tell apart."""
    return "none" if module.fp32_precision == parent.fp32_precision else module.fp32_precision


def _legacy_precision() -> str | None:
    """None where the user has set the newer ``fp32_precision`` flags: torch then refuses to tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


TORCHS_ATTENTION = (True, True, True, True, [1, 2, 0, 3, 4])
"""``attention_kernels()`` where nobody has changed them, in torch 2.14."""


def attention_kernels() -> tuple[bool, bool, bool, bool, list[int]]:
    """Which of ``SDP_KERNELS`` are enabled, and the order in which they are asked, within half a microsecond."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_sdp_priority_order(),
    )


class AttentionKernels:
    """Which kernels ``scaled_dot_product_attention`` may use, and in which order it asks them on CUDA, as it is now."""

    def __init__(self) -> None:
        *enabled, self._order = attention_kernels()
        self._enabled = dict(zip(SDP_KERNELS, enabled, strict=True))

    def restore(self) -> None:
        """Put both back."""
        for name, enabled in self._enabled.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)
        torch._C._set_sdp_priority_order(self._order)

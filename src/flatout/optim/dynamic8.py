"""Moments in 8 bits, by block-wise dynamic quantization in the format of the native steps (csrc/optim/dynamic8.h).

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022). Each block of 256 elements, in
memory order, has a float32 absmax. Codes are positions in the paper's dynamic map, as in bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flatout.core import gradients

BLOCK = 256
"""Number of elements that share one absmax."""
SMALLEST = 4096
"""Elements of the smallest parameter with moments in 8 bits. Smaller parameters would save little memory."""


def absmax_name(name: str) -> str:
    """Return the name of the state entry with the absmaxes of a moment in 8 bits."""
    return f"{name}_absmax"


def coded(state: dict[str, Any]) -> list[str]:
    """Return the names of the moments in 8 bits in a parameter's state, in use or not."""
    return [name for name in state if absmax_name(name) in state]


def check_codes(state: dict[str, Any], moments: Iterable[str], parameter: Tensor) -> None:
    """Refuse 8-bit state of ``parameter`` whose absmaxes are missing, or have another dtype or size.

    Raises:
        ValueError: the message names the entry and the expected dtype and size.
    """
    for name in moments:
        if getattr(state.get(name), "dtype", None) == torch.uint8:
            expected = (-(-parameter.numel() // BLOCK),)
            absmax = state.get(absmax_name(name))
            if absmax is None or absmax.dtype != torch.float32 or absmax.shape != expected:
                found = "none" if absmax is None else f"{absmax.dtype} of {tuple(absmax.shape)}"
                raise ValueError(
                    f"{name} in 8 bits must come with {absmax_name(name)}, float32 of {expected}, got {found}"
                )


def has_sign(name: str) -> bool:
    """Return True if a moment may be negative. Second moments are not, and have a different map."""
    return not name.endswith("_sq")


def zeros(like: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return codes and absmaxes of a moment of zeros, with the shape, strides and device of ``like``."""
    codes = torch.full_like(like, 127 if has_sign(name) else 0, dtype=torch.uint8, requires_grad=False)
    return codes, torch.zeros(-(-like.numel() // BLOCK), dtype=torch.float32, device=like.device)


def encode(values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the moment called ``name`` in 8 bits.

    Each element becomes the nearest of 256 multiples of its block's absmax. A positive second moment never becomes 0.
    If a block has an infinity or NaN, all its elements become NaN. The CPU converts for devices without kernels.

    Args:
        values: a dense tensor of any float dtype and device.
        name: name of the state entry, which determines if codes have a sign.

    Returns:
        ``(codes, absmax)`` on the device of ``values``. Codes are uint8 with the shape and strides of ``values``. The
        absmaxes are float32 of shape (ceil(numel / 256),).
    """
    here = values.detach().to(_converter(values), torch.float32)
    codes, absmax = zeros(here, name)
    torch.ops.flatout.encode_(here, codes, absmax, has_sign(name))
    return codes.to(values.device), absmax.to(values.device)


def decode(codes: Tensor, absmax: Tensor, name: str) -> Tensor:
    """Return the moment called ``name`` in float32, with the shape, strides and device of its codes."""
    here = codes.to(_converter(codes))
    values = torch.empty_like(here, dtype=torch.float32)
    torch.ops.flatout.decode_(values, here, absmax.to(here.device), has_sign(name))
    return values.to(codes.device)


def _converter(tensor: Tensor) -> torch.device:
    """Return the device of ``tensor`` if it has kernels, else the CPU."""
    return tensor.device if gradients.has_kernels(tensor.device) else torch.device("cpu")

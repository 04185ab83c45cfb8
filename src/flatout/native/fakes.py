"""Fake kernels of the native operators for tracing: shapes, dtypes and devices without computation."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.register_fake("flatout::unscale_and_check")
def _unscale_and_check(
    grads: list[Tensor], inv_scale: Tensor | None, max_norm: float | None, norm_type: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    leader = grads[0] if grads else inv_scale
    assert leader is not None  # torch dispatches by a tensor argument, so there is at least one
    wide = torch.float64 if grads and all(g.dtype == torch.float64 for g in grads) else torch.float32
    found_inf, grad_norm, grad_factor = (leader.new_empty((), dtype=d) for d in (torch.float32, wide, wide))
    return found_inf, grad_norm, grad_factor


@torch.library.register_fake("flatout::unscale_and_check_")
def _unscale_and_check_(grads: list[Tensor], inv_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return _unscale_and_check(grads, inv_scale, None)[:2]


@torch.library.register_fake("flatout::grad_norms")
def _grad_norms(grads: list[Tensor], inv_scale: Tensor | None, norm_type: float = 2.0) -> Tensor:
    wide = all(g.dtype == torch.float64 for g in grads)
    return grads[0].new_empty((len(grads),), dtype=torch.float64 if wide else torch.float32)


@torch.library.register_fake("flatout::scale_")
def _scale_(grads: list[Tensor], factor: Tensor) -> None:
    return None


@torch.library.register_fake("flatout::encode_")
def _encode_(values: Tensor, codes: Tensor, absmax: Tensor, has_sign: bool) -> None:
    return None


@torch.library.register_fake("flatout::decode_")
def _decode_(values: Tensor, codes: Tensor, absmax: Tensor, has_sign: bool) -> None:
    return None


@torch.library.register_fake("flatout::normalize_images")
def _normalize_images(
    images: Tensor, mean: list[float], std: list[float], dtype: torch.dtype, channels_last: bool
) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=memory_format)


@torch.library.register_fake("flatout::resample_images")
def _resample_images(
    images: list[Tensor], places: list[int], out: list[Tensor], mean: list[float], std: list[float]
) -> None:
    return None

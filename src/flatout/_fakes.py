"""What the native operators return, for tracing: shapes, dtypes and devices without running anything."""

from __future__ import annotations

import torch
from torch import Tensor


def _scalar(leader: Tensor, *, wide: bool) -> Tensor:
    dtype = torch.float64 if wide and leader.dtype == torch.float64 else torch.float32
    return leader.new_empty((), dtype=dtype)


@torch.library.register_fake("flatout::unscale_and_check")
def _unscale_and_check(
    grads: list[Tensor], inv_scale: Tensor | None, max_norm: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    first = grads[0]
    return _scalar(first, wide=False), _scalar(first, wide=True), _scalar(first, wide=True)


@torch.library.register_fake("flatout::unscale_and_check_")
def _unscale_and_check_(grads: list[Tensor], inv_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return _scalar(grads[0], wide=False), _scalar(grads[0], wide=True)


@torch.library.register_fake("flatout::scale_")
def _scale_(grads: list[Tensor], factor: Tensor) -> None:
    return None


@torch.library.register_fake("flatout::adamw_")
def _adamw_(*lists: list[Tensor], **options: object) -> None:
    return None


@torch.library.register_fake("flatout::sgd_")
def _sgd_(*lists: list[Tensor], **options: object) -> None:
    return None

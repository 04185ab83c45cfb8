"""One step of the native core over lists of tensors, through the operators that optimizers call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flatout.optim  # noqa: F401  (loads the operators)

ops = torch.ops.flatout
READY, MOVED, COPIED, NOT_NATIVE = range(4)
"""Results of ``set_grads``."""

DEFAULTS: dict[str, Any] = dict(
    lr_tensors=[None], weight_decays=[0.0], maximize=False, ema_decay=0.0, seed=None, grad_factor=None, found_inf=None
)
"""Arguments of ``step_bucket_`` for a step of one group without optional features."""


def step_once(
    rule: str,
    weights: list[Tensor],
    grads: list[Tensor],
    states: list[Tensor],
    absmaxes: list[Tensor],
    steps: list[Tensor],
    averages: list[Tensor],
    lows: list[Tensor],
    ids: list[int],
    options: list[float],
    *,
    lr: float,
    weight_decay: float = 0.0,
    **numbers: Any,
) -> None:
    """Make a bucket, set its gradients, step, and free the bucket."""
    bucket = ops.make_bucket(rule, weights, states, absmaxes, steps, averages, lows, ids)
    try:
        assert ops.set_grads(bucket, grads, []) == READY
        ops.step_bucket_(bucket, options, lrs=[lr], **DEFAULTS | numbers | {"weight_decays": [weight_decay]})
    finally:
        ops.free_bucket(bucket)

"""``Adam`` and ``AdamW``: torch's classes with a native step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.optim.base import NativeStep, learning_rate, like, step_count

_adamw = torch.ops.flatout.adamw_


def _begin(state: dict[str, Any], p: Tensor, amsgrad: bool) -> None:
    """State as torch begins it, except that the step count lies beside its parameter."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())):
        if name not in state:
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)


class _NativeAdam(NativeStep):
    """One native pass over parameter, gradient and moments, whatever the variant."""

    def _native_step(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        factor: Tensor | None,
        found_inf: Tensor | None,
        memory: list[Tensor] | None = None,
    ) -> None:
        device = params[0].device
        amsgrad = group["amsgrad"]
        exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = [], [], [], []
        for i, p in enumerate(params):
            state = self.state[p]
            if "exp_avg_sq" not in state or (amsgrad and "max_exp_avg_sq" not in state):
                _begin(state, p, amsgrad)
            if memory is not None:
                for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                    if name in state:
                        state[name] = like(state[name], memory[i])
            exp_avgs.append(state["exp_avg"])
            exp_avg_sqs.append(state["exp_avg_sq"])
            if amsgrad:
                max_exp_avg_sqs.append(state["max_exp_avg_sq"])
            steps.append(step_count(state, device))
        beta1, beta2 = group["betas"]
        lr, lr_tensor = learning_rate(group["lr"], device)
        _adamw(
            memory or params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            steps,
            lr=lr,
            lr_tensor=lr_tensor,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=float(group["weight_decay"]),
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            grad_factor=factor,
            found_inf=found_inf,
        )


class Adam(_NativeAdam, torch.optim.Adam):
    """Equals ``torch.optim.Adam`` with the same arguments, in one pass over memory.

    Arithmetic is in float32 (float64 for float64 parameters), rounded once when parameters and moments are
    stored. ``capturable``, ``foreach`` and ``fused`` are accepted and make no difference; ``differentiable``
    must be False. State keys and ``state_dict`` are torch's; ``step`` counts lie on the parameters' device.
    """

    _torch_class = torch.optim.Adam


class AdamW(_NativeAdam, torch.optim.AdamW):
    """Equals ``torch.optim.AdamW`` with the same arguments, in one pass over memory.

    See :class:`Adam` for what is computed how.
    """

    _torch_class = torch.optim.AdamW

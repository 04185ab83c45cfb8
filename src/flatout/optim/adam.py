"""``Adam`` and ``AdamW``: torch's classes with a native step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.optim.base import NativeStep, learning_rate, like, step_count

_adamw = torch.ops.flatout.adamw_


class _NativeAdam(NativeStep):
    """One native pass over parameter, gradient and moments, whatever the variant."""

    def _native_step(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        flat_params: list[Tensor],
        grads: list[Tensor],
        factor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        device = params[0].device
        moments: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": [], "max_exp_avg_sq": []}
        steps = []
        for p, flat in zip(params, flat_params, strict=True):
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in names:
                moment = state.get(name)
                if moment is None:
                    state[name] = moment = torch.zeros_like(p, memory_format=torch.preserve_format)
                if not (moment.is_contiguous() and flat.is_contiguous()):
                    state[name] = moment = like(moment, flat)
                moments[name].append(moment)
            steps.append(step_count(state, device))
        beta1, beta2 = group["betas"]
        lr, lr_tensor = learning_rate(group["lr"], device)
        _adamw(
            flat_params,
            grads,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments["max_exp_avg_sq"],
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
    """Equals ``torch.optim.Adam`` with the same arguments, in one pass over memory (28 bytes per fp32 parameter).

    Arithmetic is in float32 (float64 for float64 parameters), rounded once when parameters and moments are stored.
    ``capturable``, ``foreach`` and ``fused`` are accepted and make no difference; ``differentiable`` must be False.
    State keys and ``state_dict`` are torch's; ``step`` counts lie on the parameters' device.
    """

    _torch_class = torch.optim.Adam


class AdamW(_NativeAdam, torch.optim.AdamW):
    """Equals ``torch.optim.AdamW`` with the same arguments, in one pass over memory (28 bytes per fp32 parameter).

    See :class:`Adam` for what is computed how.
    """

    _torch_class = torch.optim.AdamW

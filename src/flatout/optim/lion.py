"""``Lion``: optimizer that steps by the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flatout.optim.native_step import NativeStep


class _TorchLion(torch.optim.Optimizer):
    """Lion in torch's own operations, for tensors that the native kernels do not accept."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must be one number, got a tensor of {lr.numel()}")
        if not lr >= 0.0:
            raise ValueError(f"lr must be >= 0, got {lr}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be >= 0 and < 1, got {betas}")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay must be >= 0, got {weight_decay}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for flag in ("maximize", "capturable", "differentiable"):
                group.setdefault(flag, False)
            for flag in ("foreach", "fused"):
                group.setdefault(flag, None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("Lion does not support sparse gradients")
                grad = -p.grad if group["maximize"] else p.grad
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                average = self.state[p]["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                direction = torch.lerp(grad, average, beta1)
                if p.is_complex():
                    direction = torch.view_as_complex(torch.view_as_real(direction).sign())
                else:
                    direction = direction.sign()
                p.sub_(direction * group["lr"])
                average.lerp_(grad, 1 - beta2)


class Lion(NativeStep, _TorchLion):
    """Lion as in Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), in one pass over memory.

    ``p *= 1 - lr * weight_decay;  p -= lr * sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g``

    Args:
        params: parameters, or groups of them, as in ``torch.optim``.
        lr: learning rate. A third to a tenth of AdamW's is usual, with a weight decay larger by the same factor.
        betas: coefficients of the direction of the step, and of the momentum that is kept.
        weight_decay: decoupled weight decay.
        maximize: maximize the objective instead of minimizing it.
        foreach, fused: accepted as in ``torch.optim``. They do not change the update.
        capturable: see :class:`flatout.optim.AdamW`.
        differentiable: must be False.

    For the additional options see :class:`flatout.optim.AdamW`.

    Raises:
        ValueError: an argument is out of range.
    """

    _rule = "lion"
    _torch_class = _TorchLion

    def _streams(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _counts(self, group: dict[str, Any]) -> bool:
        return False

    def _options(self, group: dict[str, Any]) -> list[float | Tensor]:
        return list(group["betas"])

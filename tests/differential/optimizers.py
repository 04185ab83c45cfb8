"""Optimizers that need only one backward pass, and all schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import flatout.optim


class Lookahead(torch.optim.Optimizer):
    """Wrapper of SGD that keeps slow weights in an attribute outside ``state``."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(params, lr, momentum=0.9)
        super().__init__(self.inner.param_groups, {"lr": lr})
        self.param_groups = self.inner.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            parameters = (p for group in self.param_groups for p in group["params"])
            for slow, p in zip(self.slow, parameters, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Signs(torch.optim.SGD):
    """Subclass with its own step, and with state that is neither a tensor nor a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("history", []).append(float(p.grad.abs().sum()))
                    p.add_(p.grad.sgn(), alpha=-0.1 * group["lr"])


def _matrices(params: list[Tensor]) -> list[Tensor]:
    return [p for p in params if p.dim() == 2 and p.numel() and not p.is_complex()]


def _muon(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(_matrices(params), 0.01)


def _hooked(params: list[Tensor]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(params, 0.003)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: None)
    return optimizer


def _subset(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params[-2:], 0.003)


def _groups(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": params[:1], "lr": 0.02, "betas": (0.8, 0.9)}, {"params": params[1:], "weight_decay": 0.1}], 0.003
    )


def _fused_earlier(params: list[Tensor]) -> torch.optim.Optimizer:
    return flatout.optim.fuse(torch.optim.AdamW(params, 0.003))


def _foreign_subset(params: list[Tensor]) -> torch.optim.Optimizer:
    """Make an optimizer that also holds a parameter outside the model."""
    return torch.optim.SGD([*params, nn.Parameter(torch.ones(3))], 0.05)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": partial(torch.optim.SGD, lr=0.02, momentum=0.9, dampening=0.5, foreach=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.02, momentum=0.9, fused=True),
    "SGD maximize": partial(torch.optim.SGD, lr=0.01, maximize=True),
    "Adam": partial(torch.optim.Adam, lr=0.003),
    "Adam fused": partial(torch.optim.Adam, lr=0.003, fused=True),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.003, amsgrad=True, foreach=True),
    "Adam tensor lr": lambda params: torch.optim.Adam(params, torch.tensor(0.003)),
    "Adam decoupled": partial(torch.optim.Adam, lr=0.003, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.003),
    "AdamW amsgrad maximize": partial(torch.optim.AdamW, lr=0.001, amsgrad=True, maximize=True),
    "AdamW groups": _groups,
    "AdamW subset": _subset,
    "Adam hooked": _hooked,
    "SGD foreign parameter": _foreign_subset,
    "NAdam": partial(torch.optim.NAdam, lr=0.003),
    "RAdam": partial(torch.optim.RAdam, lr=0.003),
    "Adamax": partial(torch.optim.Adamax, lr=0.003),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
    "Rprop": partial(torch.optim.Rprop, lr=0.001),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003, momentum=0.5, centered=True),
    "Muon": _muon,
    "SparseAdam": partial(torch.optim.SparseAdam, lr=0.01),
    "LBFGS": torch.optim.LBFGS,
    "Lookahead": partial(Lookahead, lr=0.02),
    "subclass": partial(Signs, lr=0.01),
    "flatout SGD": partial(flatout.optim.SGD, lr=0.02, momentum=0.9),
    "flatout Adam": partial(flatout.optim.Adam, lr=0.003),
    "flatout AdamW": partial(flatout.optim.AdamW, lr=0.003, amsgrad=True),
    "flatout Lion": partial(flatout.optim.Lion, lr=0.001),
    "fused earlier": _fused_earlier,
}

FOR_SPARSE = {"sparse": ("SGD", "SGD maximize", "Adagrad", "SparseAdam"), "sparse and dense": ("SGD", "Adagrad")}
"""Optimizers that accept sparse gradients."""
NO_COMPLEX = ("SGD fused", "Adam fused", "Muon", "Adafactor", "flatout Lion", "subclass", "LBFGS")
SIGNS = ("Rprop", "subclass", "flatout Lion")
"""Optimizers whose updates follow the signs of gradients, which rounding may flip."""


def _lambda(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    first, second = lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [3])


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    )


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": _lambda,
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.5),
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=3),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=4),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "SequentialLR": _sequential,
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=8),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    "ChainedScheduler": _chained,
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.01, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=60, cycle_momentum=False),
    "SWALR": partial(torch.optim.swa_utils.SWALR, swa_lr=0.005, anneal_epochs=3),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
}

"""State of a training for checkpoints.

The state has model, loss, optimizer, loss scaler, and gradients that wait for an update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.errors import parameters_of
from flatout.core.kinds import check_kinds, check_number
from flatout.training.spec import Spec
from flatout.training.stepper import Stepper


def state_dict(stepper: Stepper) -> dict[str, Any]:
    """Return the state of modules, optimizer and loss scaler, and of pending batches. Tensors are not copied."""
    spec, scaler = stepper.spec, stepper.scaler
    return {
        "modules": [module.state_dict() for module in spec.modules],
        "others": [p.detach() for p in _parameters_elsewhere(spec)],
        "optimizer": None if spec.optimizer is None else spec.optimizer.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "pending": stepper.pending,
        "gradients": [p.grad for p in _parameters(spec)] if stepper.pending else [],
        "weights": stepper.pending_weights if stepper.pending else None,
    }


def load_state_dict(stepper: Stepper, state: dict[str, Any]) -> None:
    """Load a state from ``state_dict``. The training may keep its tensors without a copy.

    Raises:
        Exception: the state does not fit. The error may be of any type, and a part of the state may be loaded.
    """
    spec = stepper.spec
    elsewhere, parameters = _parameters_elsewhere(spec), _parameters(spec)
    here = {"modules": len(spec.modules), "others": len(elsewhere), "optimizer": spec.optimizer is not None}
    there = {name: len(state[name]) for name in ("modules", "others")} | {"optimizer": state["optimizer"] is not None}
    if here != there:
        raise ValueError(f"it has {there}, this training {here}")
    if check_number(state["pending"], "pending") >= stepper.accumulate:
        raise ValueError(f"it is in the middle of more batches than accumulate={stepper.accumulate}")
    own = state_dict(stepper)
    for name in ("others", "optimizer", "scaler"):
        check_kinds(state[name], own[name], name)
    for module, saved in zip(spec.modules, state["modules"], strict=True):
        module.load_state_dict(saved)
    with torch.no_grad():
        for p, values in zip(elsewhere, state["others"], strict=True):
            p.copy_(values)
    if spec.optimizer is not None:
        spec.optimizer.load_state_dict(state["optimizer"])
    stepper.reset()
    if stepper.scaler is not None and state["scaler"] is not None:
        stepper.scaler.load_state_dict(state["scaler"])
    stepper.pending = state["pending"]
    weights = state.get("weights")  # checkpoints of earlier versions have none
    stepper.pending_weights = None if weights is None else (weights[0].to(spec.device), weights[1].to(spec.device))
    if stepper.pending:
        for p, gradient in zip(parameters, state["gradients"], strict=True):
            p.grad = None if gradient is None else gradient.to(p.device)


def _parameters(spec: Spec) -> list[Tensor]:
    """Return every parameter once, in a fixed order."""
    return [*_parameters_inside(spec).values(), *_parameters_elsewhere(spec)]


def _parameters_inside(spec: Spec) -> dict[int, nn.Parameter]:
    return {id(p): p for module in spec.modules for p in module.parameters()}


def _parameters_elsewhere(spec: Spec) -> list[Tensor]:
    """Return the optimizer's parameters outside of all modules, such as a temperature that ``compute_loss`` uses."""
    inside, held = _parameters_inside(spec), [] if spec.optimizer is None else parameters_of(spec.optimizer)
    return list({id(p): p for p in held if id(p) not in inside}.values())

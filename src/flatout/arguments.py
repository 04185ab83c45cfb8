"""Checks of the arguments of ``flatout.optimize``, before anything changes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from flatout.batch_size.learning_rate import lr_factor
from flatout.data.loaders import check_reiterable
from flatout.techniques import REGISTRY, Advice, BatchSize, Measured

BATCH_SIZE = next(technique for technique in REGISTRY if isinstance(technique, BatchSize))
"""The technique that all others depend on: as far as it can be, it is decided before them."""


def choices_of(techniques: Mapping[str, Any] | None, precision: str) -> dict[str, Any]:
    """What the user forbids or forces, by technique name."""
    choices = dict(techniques or {})
    names = [t.name for t in REGISTRY if isinstance(t, (Measured, Advice))]
    advice = [t.name for t in REGISTRY if isinstance(t, Advice)]
    for name, value in choices.items():
        if name in advice and value is not False:
            raise ValueError(f"techniques[{name!r}] must be False, or be left out: it is advice; got {value!r}")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise ValueError(f"unknown technique {name!r} in techniques: {hint}")
    if precision not in ("auto", "fp32", "tf32", "bf16", "fp16"):
        raise ValueError(f"precision must be 'auto', 'fp32', 'tf32', 'bf16' or 'fp16', got {precision!r}")
    if precision != "auto":
        choices["precision"] = False if precision in ("fp32", "tf32") else precision
    if precision in ("fp32", "tf32"):
        choices["tf32"] = precision == "tf32"
    if choices.get("torchscript", False) is not False:
        choices.setdefault("compile", False)  # one of the two runs the model
    if choices.get("cuda_graph", False) is not False:
        choices.setdefault("fused_optimizer", True)  # its update is the one that can be captured
    return choices


def check_arguments(model: Any, loader: Any, optimizer: Any, loss_fn: Any, compute_loss: Any, loss_weight: Any) -> None:
    """Refuse objects of the wrong kind, and an optimizer or a model that cannot train."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}")
    check_reiterable(loader)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not trainable and (optimizer is not None or model.training):
        raise ValueError("the model has no parameter that requires gradients: there is nothing to train")
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held & trainable:
            raise ValueError("the optimizer holds none of the model's trainable parameters: was it made for another?")
    for name, function in (("loss_fn", loss_fn), ("compute_loss", compute_loss), ("loss_weight", loss_weight)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    if loss_fn is not None and compute_loss is not None:
        raise ValueError("give loss_fn or compute_loss, not both")


def check_schedule(
    optimizer: Any,
    scheduler: Any,
    accumulate: int,
    max_grad_norm: float | None,
    loss_weight: Any,
    batch_size: str | int,
    memory_limit: int | None,
) -> None:
    """What only an update uses needs an optimizer, of a kind that one backward pass suffices for."""
    asked = {
        "scheduler": scheduler,
        "max_grad_norm": max_grad_norm,
        "accumulate": accumulate if accumulate > 1 else None,
        "loss_weight": loss_weight,
        "batch_size": None if batch_size == "keep" else batch_size,
        "memory_limit": memory_limit,
    }
    for name, value in asked.items():
        if optimizer is None and value is not None:
            raise ValueError(f"{name} is used by run.step, which needs an optimizer: give one to optimize()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure many times in a step: run.step cannot drive it")
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer)


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot be stepped without a metric, and the scheduler of another optimizer."""
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, type):
        raise TypeError(f"scheduler must have a step() method, got {scheduler!r}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau is stepped with a metric: call its step(metric) yourself, after run.evaluate"
        )
    steers = getattr(scheduler, "optimizer", None)
    if isinstance(steers, torch.optim.Optimizer) and not _share_groups(steers, optimizer):
        raise ValueError(
            f"scheduler must be made for the optimizer that is given, got the {type(scheduler).__name__} of another "
            f"{type(steers).__name__}. Make it anew: scheduler = {type(scheduler).__name__}(optimizer, ...)"
        )


def _share_groups(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether a learning rate set in one optimizer is the other's: they are one, or one wraps the other."""
    if any(mine is theirs for mine in one.param_groups for theirs in other.param_groups):
        return True
    return any(value is one for value in vars(other).values()) or any(value is other for value in vars(one).values())


def check_numbers(
    accumulate: int, max_grad_norm: float | None, expected_steps: int | None, budget: float, memory_limit: int | None
) -> None:
    """Refuse numbers out of range."""
    if accumulate < 1:
        raise ValueError(f"accumulate must be >= 1, got {accumulate}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {max_grad_norm}")
    if expected_steps is not None and expected_steps < 1:
        raise ValueError(f"expected_steps must be >= 1, got {expected_steps}")
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit must be >= 1 byte, got {memory_limit}")
    if not budget >= 0:
        raise ValueError(f"budget must be >= 0 seconds, got {budget}")


def check_batch_size(batch_size: Any, lr_rule: str, accumulate: int, choices: Mapping[str, Any]) -> None:
    """Refuse a batch size that is no number of samples, or that ``techniques`` decides about, too."""
    lr_factor(lr_rule, 1, 1)
    if batch_size == "keep":
        return
    if batch_size != "auto" and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size must be 'keep', 'auto' or a number of samples, got {batch_size!r}")
    if batch_size != "auto" and batch_size % accumulate:
        raise ValueError(f"batch_size must be a multiple of accumulate={accumulate}, got {batch_size}")
    if BATCH_SIZE.name in choices:
        raise ValueError(
            f"techniques[{BATCH_SIZE.name!r}] and batch_size={batch_size!r} decide about the same: give one"
        )


def planned_batch_size(planned: Any, batch_size: str | int, accumulate: int) -> dict[str, Any]:
    """The batch size of a plan as a choice; that which was asked for, where the plan has none."""
    if not isinstance(batch_size, int):
        return {}
    samples, there = batch_size // accumulate, (planned or {}).get("samples")
    if there not in (None, samples):
        raise ValueError(f"this plan was made for batch_size={there * accumulate}, got {batch_size}")
    return {BATCH_SIZE.name: {"micro_batch": None} | (planned or {}) | {"samples": samples}}


def device_of(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    """The device asked for; else the GPU that the model is on, or any GPU, or the CPU."""
    if wanted is not None:
        return torch.device(wanted)
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the model is spread over {names}: flatout trains on one device")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

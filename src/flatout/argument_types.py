"""Checks of the types of ``flatout.optimize``'s arguments. Errors show the line of code to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from flatout.data.loaders import check_reiterable
from flatout.tuning.request import Request


def check_types(request: Request) -> None:
    """Reject objects of the wrong type, and classes in place of their instances.

    Raises:
        TypeError: an object is of the wrong type.
        ValueError: ``loss_fn`` and ``compute_loss`` are both given.
    """
    r = request
    _check_model(r.model)
    _check_loader(r.loader)
    if r.optimizer is not None:
        _check_optimizer(r.optimizer)
    for name in ("loss_fn", "compute_loss", "loss_weight"):
        _check_function(name, getattr(r, name))
    if r.loss_fn is not None and r.compute_loss is not None:
        raise ValueError("loss_fn must be None where compute_loss is given, got both. Give one, not both")


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    fix = ""
    if isinstance(model, (Sequence, Mapping)) and not isinstance(model, str):
        fix = (
            ". Keep the loop of several models: run `flatout run train.py`, or tune each model in it, "
            "`model, loader = flatout.optimize(model, loader)`"
        )
    elif isinstance(model, type):
        fix = f". Call the class: model = {model.__name__}(...)"
    raise TypeError(f"model must be a torch.nn.Module, got {_kind(model)}{fix}")


def _check_loader(loader: Any) -> None:
    if isinstance(loader, torch.optim.Optimizer):
        fix = ". Give the loader before the optimizer: flatout.optimize(model, loader, optimizer)"
    elif isinstance(loader, Iterable):
        return check_reiterable(loader)
    elif isinstance(loader, Dataset) or (hasattr(loader, "__getitem__") and hasattr(loader, "__len__")):
        fix = ". Make batches: loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)"
    else:
        fix = ""
    raise TypeError(f"loader must be an iterable of batches, got {_kind(loader)}{fix}")


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    name = optimizer.__name__ if _is_class(optimizer, torch.optim.Optimizer) else "AdamW"
    fix = f"Write optimizer = torch.optim.{name}(model.parameters(), lr=1e-3)"
    if isinstance(optimizer, (Sequence, Mapping)) and not isinstance(optimizer, str):
        fix = (
            "Keep the loop of several optimizers: run `flatout run train.py`, or leave them out, "
            "`model, loader = flatout.optimize(model, loader)`"
        )
    raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {_kind(optimizer)}. {fix}")


def _check_function(name: str, function: Any) -> None:
    if _is_class(function, nn.Module):
        line = f"{name} = {function.__name__}()"
        raise TypeError(f"{name} must be callable with a batch, got {_kind(function)}. Call the class: {line}")
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be callable, got {_kind(function)}")


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _kind(value: Any) -> str:
    """Return a description of a value, such as ``the class AdamW``, ``a list of 2``, or the name of its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__

"""Checks of the arguments of ``flatout.optimize``, before anything changes. Errors show what to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from flatout.core.reproducible import check_seed
from flatout.data.loaders import check_reiterable
from flatout.plan import Plan
from flatout.techniques import REGISTRY
from flatout.training.learning_rate import LR_RULES
from flatout.tuning.ranks import PARALLEL
from flatout.tuning.request import BATCH_SIZE, Choices, Request, choices_of, planned, precision_of

BUDGET_VARIABLE = "FLATOUT_BUDGET"
"""Environment variable for the seconds to spend on measurements, if ``budget`` is not given."""


def budget_of(budget: float | None) -> float | None:
    """Return the argument ``budget``, else the value of ``FLATOUT_BUDGET``, or None if neither is given.

    Raises:
        ValueError: the variable is needed, and its value is not a number >= 0.
    """
    text = os.environ.get(BUDGET_VARIABLE, "").strip()
    if budget is not None or not text:
        return budget
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(f"{BUDGET_VARIABLE} must be a number of seconds >= 0, got {text!r}. Correct or unset it")
    return seconds


def validate(request: Request) -> Choices:
    """Check all arguments, and return the choices that they make.

    Raises:
        TypeError: an argument has an unsupported type.
        ValueError: an argument has a wrong value, or two arguments contradict each other.
    """
    r = request
    choices = choices_of(r.techniques, r.precision)
    check_types(r)
    check_weights(r.model, r.optimizer, {"model": r.model, "loss_fn": r.loss_fn, "compute_loss": r.compute_loss})
    check_precision(r.model, precision_of(r.precision))
    check_numbers(r.accumulate, r.max_grad_norm, r.expected_steps, r.budget, r.memory_limit)
    check_schedule(r)
    check_batch_size(r.batch_size, r.lr_rule, r.accumulate, choices.asked)
    if r.seed is not None:
        check_seed(r.seed)
    if r.parallel not in PARALLEL:
        raise ValueError(f"parallel must be one of {', '.join(map(repr, PARALLEL))}, got {r.parallel!r}")
    given = r.given_plan
    if given is None:
        return choices
    plan = given if isinstance(given, Plan) else Plan.load(given)
    return planned(choices, plan, r.batch_size, r.accumulate)


def check_precision(model: nn.Module, precision: str) -> None:
    """Reject ``"fp32"`` and ``"tf32"`` for a model whose parameters have another dtype."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if precision in ("fp32", "tf32") and not dtypes <= {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"precision must fit a model of {names}, got {precision!r}. Call model.float() first")


def check_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None, functions: Mapping[str, Any]) -> None:
    """Reject modules without weights in memory, and a model or an optimizer that cannot train."""
    for name, module in functions.items():
        if isinstance(module, nn.Module):
            _check_materialized(name, module)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not trainable and (optimizer is not None or model.training):
        raise ValueError(
            "model must have a parameter that requires gradients, got none, so there is nothing to train. "
            "Call model.requires_grad_(True)"
        )
    if optimizer is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(not is_lazy(p) and p.is_meta for p in parameters):
            raise ValueError(
                "optimizer must be made of the model's current weights, got parameters on the meta device. After "
                f"model.to_empty(...), call optimizer = {type(optimizer).__name__}(model.parameters(), ...)"
            )
        if not {id(p) for p in parameters} & trainable:
            raise ValueError(
                "optimizer must hold trainable parameters of the model, got none of the model's. Make a new one: "
                f"optimizer = {type(optimizer).__name__}(model.parameters(), ...)"
            )


def _check_materialized(name: str, module: nn.Module) -> None:
    """Reject a module with lazy parameters or with tensors on the meta device."""
    for key, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} must be initialized, got {key!r} of a lazy module. Run one batch through it first: "
                "model(next(iter(loader))[0]), or model(**next(iter(loader)))"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name} must have its weights in memory, got {key!r} on the meta device. Before you make the "
                f"optimizer, call {name}.to_empty(device='cpu'); {name}.load_state_dict(...)"
            )


def check_schedule(request: Request) -> None:
    """Reject an optimizer or a scheduler that ``run.step`` cannot step, and arguments that need an optimizer.

    Raises:
        TypeError: ``scheduler`` has no ``step`` method.
        ValueError: an argument needs an optimizer, or ``run.step`` cannot step the optimizer or the scheduler.
    """
    if request.optimizer is None:
        for name in request.run_step_arguments:
            raise ValueError(f"{name} is used by run.step, which needs an optimizer. Give an optimizer to optimize()")
        return
    if isinstance(request.optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer must step without a closure, got LBFGS. Keep your own loop: "
            "`model, loader = flatout.optimize(model, loader)`"
        )
    if request.scheduler is not None:
        _check_scheduler(request.scheduler, request.optimizer)


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Reject a scheduler that needs a metric, and a scheduler of another optimizer."""
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, type):
        raise TypeError(f"scheduler must have a step() method, got {scheduler!r}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "scheduler must step without a metric, got a ReduceLROnPlateau. Leave scheduler out, and call "
            "scheduler.step(metric) after run.evaluate"
        )
    steers = getattr(scheduler, "optimizer", None)
    if isinstance(steers, torch.optim.Optimizer) and not _share_groups(steers, optimizer):
        raise ValueError(
            f"scheduler must be made for the optimizer of optimize(), got the {type(scheduler).__name__} of another "
            f"{type(steers).__name__}. Make a new one: scheduler = {type(scheduler).__name__}(optimizer, ...)"
        )


def _share_groups(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Return True if a learning rate that is set in one optimizer is also set in the other.

    Such optimizers share a parameter group, or one of them wraps the other.
    """
    if any(mine is theirs for mine in one.param_groups for theirs in other.param_groups):
        return True
    return any(value is one for value in vars(other).values()) or any(value is other for value in vars(one).values())


def check_numbers(
    accumulate: int,
    max_grad_norm: float | None,
    expected_steps: int | None,
    budget: float | None,
    memory_limit: int | None,
) -> None:
    """Reject values that are not numbers, and numbers that are out of range.

    Raises:
        TypeError: an argument is not a number, or ``accumulate`` is not a whole number.
        ValueError: a number is out of range.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, Integral):
        raise TypeError(f"accumulate must be an int >= 1, got {accumulate!r}. Write accumulate=2 for two batches")
    _check_number("max_grad_norm", max_grad_norm, "max_grad_norm=1.0")
    _check_number("expected_steps", expected_steps, "expected_steps=10 * len(loader)")
    _check_number("budget", budget, "budget=5 for five seconds")
    _check_number("memory_limit", memory_limit, "memory_limit=8 * 2**30 for 8 GiB")
    if accumulate < 1:
        raise ValueError(f"accumulate must be >= 1, got {accumulate}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {max_grad_norm}")
    if expected_steps is not None and expected_steps < 1:
        raise ValueError(f"expected_steps must be >= 1, got {expected_steps}")
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit must be >= 1 byte, got {memory_limit}")
    if budget is not None and not budget >= 0:
        raise ValueError(f"budget must be >= 0 seconds, got {budget}")


def _check_number(name: str, value: Any, code: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be a number, got {value!r}. Write {code}")


def check_batch_size(batch_size: Any, lr_rule: str, accumulate: int, asked: Mapping[str, Any]) -> None:
    """Reject an unknown rule, a batch size that is not a positive int, and contradictions with ``techniques``."""
    if lr_rule not in ("auto", *LR_RULES):
        raise ValueError(f"lr_rule must be one of 'auto', {', '.join(map(repr, LR_RULES))}, got {lr_rule!r}")
    given = asked.get(BATCH_SIZE.name)
    there = given.get("lr_rule", lr_rule) if isinstance(given, Mapping) else lr_rule
    if lr_rule not in ("auto", there):
        raise ValueError(
            f"techniques[{BATCH_SIZE.name!r}] must agree with lr_rule={lr_rule!r}, got {there!r}. Give only one"
        )
    if batch_size == "keep":
        return
    if batch_size != "auto" and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size must be 'keep', 'auto' or a number of samples, got {batch_size!r}")
    if batch_size != "auto" and batch_size % accumulate:
        raise ValueError(f"batch_size must be a multiple of accumulate={accumulate}, got {batch_size}")
    if BATCH_SIZE.name in asked:
        raise ValueError(
            f"techniques[{BATCH_SIZE.name!r}] and batch_size={batch_size!r} decide about the same. Give only one"
        )


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


P = ParamSpec("P")
R = TypeVar("R")

OTHER_NAMES = {
    "accumulate=4": (
        "gradient_accumulation_steps",
        "gradient_accumulation",
        "accumulate_grad_batches",
        "accumulation_steps",
        "grad_accum",
    ),
    "batch_size=256": ("batch", "bs", "train_batch_size", "per_device_train_batch_size", "global_batch_size"),
    "budget=60": ("timeout", "time_limit", "time_budget", "max_seconds"),
    "device='cuda'": ("gpu", "gpus", "cuda", "accelerator"),
    "expected_steps=10 * len(loader)": ("epochs", "num_epochs", "max_epochs", "max_steps", "total_steps", "num_steps"),
    "loader=loader": ("dataset", "data", "dataloader", "data_loader", "train_loader", "train_dataloader"),
    "loss_fn=torch.nn.functional.cross_entropy": ("loss", "criterion", "loss_function", "loss_func"),
    "max_grad_norm=1.0": ("gradient_clip_val", "gradient_clipping", "clip_grad_norm", "clip_grad", "grad_clip"),
    "memory_limit=8 * 2**30": ("memory", "max_memory"),
    "optimizer=optimizer": ("opt", "optim", "optimizers"),
    "precision='bf16'": ("amp", "mixed_precision", "autocast", "amp_dtype", "dtype", "fp16", "bf16"),
    "scheduler=scheduler": ("lr_scheduler", "schedulers"),
    "seed=0": ("random_seed", "manual_seed"),
    "techniques={'workers': 4}": ("num_workers", "dataloader_num_workers"),
    "techniques={'compile': True}": ("torch_compile",),
}
"""Names of the same arguments in other libraries, by the code to write instead."""


def explains_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, with an error for unknown keywords that shows the argument to write instead."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(f"{function.__name__}() has no argument {name!r}. {_instead(name, value, known)}")
        return function(*args, **kwargs)

    return checked


def _instead(name: str, value: object, known: tuple[str, ...]) -> str:
    """Return a sentence with the code to write in place of an unknown keyword and its value."""
    for code, names in OTHER_NAMES.items():
        if name in names and code.partition("=")[0] in known:
            return f"Write {code}"
    if any(name == technique.name for technique in REGISTRY):
        return f"Write techniques={{{name!r}: {value!r}}}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}=?" if close else f"Choose from {', '.join(known)}"

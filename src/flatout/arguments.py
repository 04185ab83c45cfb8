"""Checks of the arguments of ``flatout.optimize``, before anything changes."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatout.data.loaders import check_reiterable, is_rewindable
from flatout.techniques import REGISTRY, Advice, BatchSize, LoaderTechnique, Measured, NotApplicable, Rule
from flatout.training.learning_rate import lr_factor

if TYPE_CHECKING:
    from flatout.training.job import Job

BATCH_SIZE = next(technique for technique in REGISTRY if isinstance(technique, BatchSize))
"""The technique that ``optimize`` decides first where it can, because all others depend on it."""


def choices_of(techniques: Mapping[str, Any] | None, precision: str) -> dict[str, Any]:
    """Return the user's choices by technique name: ``False`` forbids, any other value forces."""
    if techniques is not None and not isinstance(techniques, Mapping):
        raise TypeError(f"techniques must be a dict, got {techniques!r}. Write techniques={{'compile': False}}")
    for name, value in (techniques or {}).items():
        _check_choice(name, value)
    choices = _given(techniques)
    if precision not in ("auto", "fp32", "tf32", "bf16", "fp16"):
        raise ValueError(f"precision must be 'auto', 'fp32', 'tf32', 'bf16' or 'fp16', got {precision!r}")
    for name, value in _choices_of_precision(precision).items():
        if choices.setdefault(name, value) != value:
            raise ValueError(
                f"techniques[{name!r}] must agree with precision={precision!r}, got {choices[name]!r}. Give only one"
            )
    if _forces(choices, "torchscript"):
        if _forces(choices, "compile"):
            raise ValueError(
                f"techniques['torchscript'] must not be forced together with techniques['compile'], got "
                f"{choices['torchscript']!r} and {choices['compile']!r}. Leave one of the two out"
            )
        choices.setdefault("compile", False)
    if _forces(choices, "cuda_graph"):
        choices.setdefault("fused_optimizer", True)  # a graph can capture only the fused optimizer's update
    if _forces(choices, "tf32"):
        choices.setdefault("precision", False)  # autocast would leave no float32 products
    if _forces(choices, "workers") and choices["workers"] != 0:
        choices.setdefault("in_memory", False)  # workers have nothing to do when batches are gathered from memory
    return choices


def forced_by_name(techniques: Mapping[str, Any] | None, precision: str) -> dict[str, str]:
    """Return the beginning of the error message for each forced technique, by technique name."""
    given, by_precision = _given(techniques), _choices_of_precision(precision)
    forced = {name: f"techniques[{name!r}] must serve this job, got {given[name]!r}" for name in given}
    forced |= {name: f"precision must serve this job, got {precision!r}" for name in by_precision}
    return {name: begins for name, begins in forced.items() if _forces(given | by_precision, name)}


def check_forced(
    technique: Measured, job: Job, choices: Mapping[str, Any], forced: Mapping[str, str], reason: str
) -> None:
    """Raise if a forced technique does not apply, unless the job already is what the technique would make it.

    Args:
        technique: a technique that does not apply to ``job``.
        job: the training job.
        choices: the result of ``choices_of``.
        forced: the result of ``forced_by_name``.
        reason: why the technique does not apply.

    Raises:
        ValueError: the technique is forced. The message names the argument and the reason.
    """
    if technique.name in forced and not technique.is_so(job, choices[technique.name]):
        raise ValueError(f"{forced[technique.name]}: {reason.rstrip('.')}. Leave it out")


def check_applicable(job: Job, choices: Mapping[str, Any], forced: Mapping[str, str]) -> None:
    """Refuse forced techniques that cannot apply, as far as this is known before the first step.

    Raises:
        ValueError: see ``check_forced``. Or a technique has no candidate with the forced value.
    """
    for technique in REGISTRY:
        if not isinstance(technique, Measured) or not _forces(choices, technique.name):
            continue
        try:
            technique.check(job)
            if isinstance(technique, LoaderTechnique) and not is_rewindable(job.data.loader):
                raise NotApplicable("the loader cannot be rewound: replacing it would lose samples")
            technique.forced(job, choices[technique.name])
        except NotApplicable as reason:
            if reason.lasts:
                check_forced(technique, job, choices, forced, str(reason))


def check_precision(model: nn.Module, precision: str) -> None:
    """Refuse float32 precision for a model whose parameters have another dtype."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if precision in ("fp32", "tf32") and not dtypes <= {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"precision must fit a model of {names}, got {precision!r}. Call model.float() first")


def _given(techniques: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the choices in ``techniques`` without those that are None, which a trial decides."""
    return {name: value for name, value in (techniques or {}).items() if value is not None}


def _forces(choices: Mapping[str, Any], name: str) -> bool:
    return choices.get(name, False) is not False  # {"workers": 0} forces 0 workers


def _choices_of_precision(precision: str) -> dict[str, Any]:
    if precision in ("fp32", "tf32"):
        return {"precision": False, "tf32": precision == "tf32"}
    return {} if precision == "auto" else {"precision": precision}


def _check_choice(name: str, value: Any) -> None:
    """Refuse an unknown technique, a rule, and advice that is not ``False``.

    Raises:
        ValueError: the message names the technique.
    """
    technique = next((t for t in REGISTRY if t.name == name), None)
    if isinstance(technique, Rule):
        governed = f"Use optimize({technique.argument}=...)" if technique.argument else "Leave it out"
        raise ValueError(
            f"techniques[{name!r}] must not be given, got {value!r}. {technique.title} is a rule, which needs no "
            f"trial. {governed}"
        )
    if isinstance(technique, Advice) and value is not False:
        raise ValueError(
            f"techniques[{name!r}] must be False, got {value!r}. Leave it out: advice only changes the report"
        )
    if technique is None:
        names = [t.name for t in REGISTRY if not isinstance(t, Rule)]
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Choose from {', '.join(names)}"
        raise ValueError(f"techniques must name techniques that exist, got {name!r}. {hint}")


def check_arguments(model: Any, loader: Any, optimizer: Any, loss_fn: Any, compute_loss: Any, loss_weight: Any) -> None:
    """Refuse objects of the wrong type, and a model or an optimizer that cannot train."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}")
    check_reiterable(loader)
    for name, module in (("model", model), ("loss_fn", loss_fn), ("compute_loss", compute_loss)):
        if isinstance(module, nn.Module):
            _check_materialized(name, module)
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not trainable and (optimizer is not None or model.training):
        raise ValueError(
            "model must have a parameter that requires gradients, got none, so there is nothing to train. "
            "Call model.requires_grad_(True)"
        )
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
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
    for name, function in (("loss_fn", loss_fn), ("compute_loss", compute_loss), ("loss_weight", loss_weight)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    if loss_fn is not None and compute_loss is not None:
        raise ValueError("loss_fn must be None where compute_loss is given, got both. Give one, not both")


def _check_materialized(name: str, module: nn.Module) -> None:
    """Refuse a module with lazy parameters or with tensors on the meta device."""
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


def check_schedule(
    optimizer: Any,
    scheduler: Any,
    accumulate: int,
    max_grad_norm: float | None,
    loss_weight: Any,
    batch_size: str | int,
    memory_limit: int | None,
) -> None:
    """Refuse arguments that only an update uses without an optimizer, LBFGS, and schedulers that cannot be stepped.

    Raises:
        TypeError: ``scheduler`` has no ``step`` method.
        ValueError: an argument needs an optimizer, or ``run.step`` cannot drive the optimizer or the scheduler.
    """
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
            raise ValueError(f"{name} is used by run.step, which needs an optimizer. Give an optimizer to optimize()")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer must step without a closure, got LBFGS. Keep your own loop: "
            "`model, loader = flatout.optimize(model, loader)`"
        )
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer)


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a scheduler that needs a metric, and a scheduler of another optimizer."""
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
    """Return whether a learning rate set in one optimizer is set in the other.

    True where both share a param group or one wraps the other.
    """
    if any(mine is theirs for mine in one.param_groups for theirs in other.param_groups):
        return True
    return any(value is one for value in vars(other).values()) or any(value is other for value in vars(one).values())


def check_numbers(
    accumulate: int, max_grad_norm: float | None, expected_steps: int | None, budget: float, memory_limit: int | None
) -> None:
    """Refuse numbers that are out of range."""
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
    """Refuse a batch size that is not a positive int, and one that ``techniques`` also sets."""
    lr_factor(lr_rule, 1, 1)
    if batch_size == "keep":
        return
    if batch_size != "auto" and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size must be 'keep', 'auto' or a number of samples, got {batch_size!r}")
    if batch_size != "auto" and batch_size % accumulate:
        raise ValueError(f"batch_size must be a multiple of accumulate={accumulate}, got {batch_size}")
    if BATCH_SIZE.name in choices:
        raise ValueError(
            f"techniques[{BATCH_SIZE.name!r}] and batch_size={batch_size!r} decide about the same. Give only one"
        )


def planned_batch_size(planned: Any, batch_size: str | int, accumulate: int) -> dict[str, Any]:
    """Return the plan's batch size as a choice, or the requested one where the plan has none.

    Args:
        planned: the plan's decision about the batch size.
        batch_size: the argument of ``optimize``, in samples per update where it is an int.
        accumulate: batches per update.

    Raises:
        ValueError: the plan was made for another batch size.
    """
    if not isinstance(batch_size, int):
        return {}
    samples, there = batch_size // accumulate, (planned or {}).get("samples")
    if there not in (None, samples):
        raise ValueError(
            f"batch_size must fit the plan, which was made for batch_size={there * accumulate}, got {batch_size}"
        )
    return {BATCH_SIZE.name: {"micro_batch": None} | (planned or {}) | {"samples": samples}}


def device_of(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    """Return the requested device, else the model's GPU, else the current GPU, else the CPU."""
    if wanted is not None:
        return torch.device(wanted)
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model must be on one GPU, got parameters on {names}. Call model.to('cuda')")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

"""Arguments of ``flatout.optimize``: their checks, before anything changes, and the choices that they make.

Errors show what to write instead.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from flatout.core import formatting
from flatout.core.reproducible import check_seed, is_reproducible
from flatout.data.loaders import check_reiterable, is_rewindable
from flatout.distributed.agreement import ALONE, Agreement
from flatout.plan import Plan
from flatout.techniques import (
    REGISTRY,
    Advice,
    BatchSize,
    LoaderTechnique,
    Measured,
    NotApplicable,
    Rule,
    Technique,
)
from flatout.training.job import Job
from flatout.training.learning_rate import LR_RULES, rule_for
from flatout.training.spec import CACHED, Spec, device_of
from flatout.tuning.ranks import PARALLEL

BATCH_SIZE = next(technique for technique in REGISTRY if isinstance(technique, BatchSize))
"""Technique that is decided first if possible, because all others depend on it."""

FORBIDDABLE = tuple(t.name for t in REGISTRY if not isinstance(t, Rule) or t.is_forbiddable)
"""Names of the techniques that ``techniques={name: False}`` forbids."""


@dataclass(frozen=True)
class Choices:
    """Techniques that are forbidden or forced, by name.

    Attributes:
        values: value of each technique; False forbids it.
        asked: the part of ``values`` that the user gave by ``techniques=`` and ``precision=``.
        errors: beginning of the error message of each technique that the user forces.
        plan: the plan that the other ``values`` come from; None without a plan.
    """

    values: Mapping[str, Any]
    asked: Mapping[str, Any]
    errors: Mapping[str, str]
    plan: Plan | None = None

    @property
    def chooser(self) -> str:
        """Origin of the values, for the report."""
        return "techniques=" if self.plan is None else "the plan"

    def of(self, technique: Technique) -> Any:
        """Return the technique's value; None if a trial decides."""
        return self.values.get(technique.name)

    def refuse(self, technique: Measured, job: Job, reason: str, cause: BaseException | None = None) -> None:
        """Raise if a rejected technique was forced, unless the job already has the technique's effect.

        Args:
            technique: a technique that is not kept.
            job: the training.
            reason: why the technique is not kept.
            cause: error of a step with the technique; None without one.

        Raises:
            ValueError: the technique is forced. The message names the argument and the reason.
        """
        if technique.name in self.errors and not technique.is_so(job, self.asked[technique.name]):
            raise ValueError(f"{self.errors[technique.name]}: {reason.rstrip('.')}. Leave it out") from cause

    def check_forbidden(self, rule: Rule, job: Job) -> None:
        """Reject a forbidden rule that is built into ``Run`` for this job.

        Raises:
            ValueError: ``rule`` is built into ``Run`` for this job.
        """
        if rule.candidate(job) is None:
            raise ValueError(
                f"techniques[{rule.name!r}] must not be given for this job, got False. "
                f"{formatting.capital(rule.title)} is a rule that is built into Run here. Leave it out"
            )

    def check(self, job: Job) -> None:
        """Reject forced techniques that do not apply, as far as this is known without trials.

        Raises:
            ValueError: a forced technique does not apply, or has no candidate with the forced value.
        """
        for technique in REGISTRY:
            if not isinstance(technique, Measured) or not forces(self.values, technique.name):
                continue
            value = self.of(technique)
            try:
                if technique.accepts(value):
                    technique.check(job)
                    if isinstance(technique, LoaderTechnique) and not is_rewindable(job.data.loader):
                        raise NotApplicable("the loader cannot be rewound: replacing it would lose samples")
                technique.check_value(job, value)
            except NotApplicable as reason:
                self.refuse(technique, job, str(reason))

    def check_plan(self, technique: Measured, value: Any) -> None:
        """Raise if the user's choice for a technique disagrees with the plan.

        Args:
            technique: a technique that applies.
            value: the decision; False if the technique is not kept.
        """
        if self.plan is not None and technique.name in self.asked:
            self.plan.check_choice(technique.name, value)


def choices_of(techniques: Mapping[str, Any] | None, precision: str | torch.dtype) -> Choices:
    """Return the choices that ``techniques=`` and ``precision=`` make.

    Raises:
        TypeError: ``techniques`` is not a mapping.
        ValueError: a technique or a value is unknown, or two choices contradict each other.
    """
    if techniques is not None and not isinstance(techniques, Mapping):
        raise TypeError(f"techniques must be a dict, got {techniques!r}. Write techniques={{'compile': False}}")
    for name, value in (techniques or {}).items():
        _check_choice(name, value)
    precision = precision_of(precision)
    given = {name: value for name, value in (techniques or {}).items() if value is not None}
    by_precision = _choices_of_precision(precision)
    asked = _with_consequences(_merged(given, by_precision, precision))
    errors = {name: f"techniques[{name!r}] must serve this job, got {given[name]!r}" for name in given}
    errors |= {name: f"precision must serve this job, got {precision!r}" for name in by_precision}
    errors = {name: begins for name, begins in errors.items() if forces(given | by_precision, name)}
    return Choices(asked, asked, errors)


def planned(choices: Choices, plan: Plan, batch_size: str | int, accumulate: int) -> Choices:
    """Return the user's choices with those of a plan.

    Args:
        choices: result of ``choices_of``.
        plan: the plan.
        batch_size: argument of ``optimize``, in samples per update if it is an int.
        accumulate: batches per update.

    Raises:
        ValueError: the plan decides about an unknown technique, or was made for another batch size.
    """
    plan.check_decisions()
    values = {t.name: plan.decisions.get(t.name, False) for t in REGISTRY if isinstance(t, Measured)}
    values |= choices.asked
    values |= _planned_batch_size(values[BATCH_SIZE.name], batch_size, accumulate)
    return Choices(values, choices.asked, choices.errors, plan)


def forces(choices: Mapping[str, Any], name: str) -> bool:
    """Return True if a technique is forced: ``{"workers": 0}`` forces 0 workers."""
    return choices.get(name, False) is not False


def _merged(given: Mapping[str, Any], by_precision: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return the choices of ``techniques=`` and ``precision=`` if they agree."""
    for name, value in by_precision.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"techniques[{name!r}] must agree with precision={precision!r}, got {given[name]!r}. Give only one"
            )
    return {**given, **by_precision}


def _with_consequences(choices: dict[str, Any]) -> dict[str, Any]:
    """Return the choices, with their consequences for other techniques."""
    if forces(choices, "torchscript"):
        if forces(choices, "compile"):
            raise ValueError(
                f"techniques['torchscript'] must not be forced together with techniques['compile'], got "
                f"{choices['torchscript']!r} and {choices['compile']!r}. Leave one of the two out"
            )
        choices.setdefault("compile", False)
    if forces(choices, "cuda_graph"):
        choices.setdefault("fused_optimizer", True)  # a graph can capture only the fused optimizer's update
    if forces(choices, "tf32"):
        choices.setdefault("precision", False)  # autocast would leave no float32 products
    if forces(choices, "workers") and choices["workers"] != 0:
        choices.setdefault("in_memory", False)  # workers are idle if batches are gathered from memory
    return choices


def _choices_of_precision(precision: str) -> dict[str, Any]:
    if precision in ("fp32", "tf32"):
        return {"precision": False, "tf32": precision == "tf32"}
    return {} if precision == "auto" else {"precision": precision}


def _check_choice(name: str, value: Any) -> None:
    """Reject an unknown technique, a rule that is forced or built in, and advice that is not ``False``.

    Raises:
        ValueError: the message names the technique.
    """
    technique = next((t for t in REGISTRY if t.name == name), None)
    if technique is None:
        close = difflib.get_close_matches(str(name), FORBIDDABLE, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Choose from {', '.join(FORBIDDABLE)}"
        raise ValueError(f"techniques must name techniques that exist, got {name!r}. {hint}")
    if isinstance(technique, Rule) and not (technique.is_forbiddable and (value is False or value is None)):
        governed = f"Use optimize({technique.argument}=...)" if technique.argument else "Leave it out"
        allowed = "be False" if technique.is_forbiddable else "not be given"
        raise ValueError(
            f"techniques[{name!r}] must {allowed}, got {value!r}. {technique.title} is a rule, which needs no "
            f"trial. {governed}"
        )
    if isinstance(technique, Advice) and value is not False:
        raise ValueError(
            f"techniques[{name!r}] must be False, got {value!r}. Leave it out: advice only changes the report"
        )


def _planned_batch_size(planned: Any, batch_size: str | int, accumulate: int) -> dict[str, Any]:
    """Return the plan's batch size as a choice, or the requested one if the plan has none.

    Args:
        planned: the plan's decision about the batch size.
        batch_size: the argument of ``optimize``, in samples per update if it is an int.
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


PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")

OTHER_PRECISIONS = {
    "fp32": ("float32", "float", "32", "32-true", "no"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16", "bf16-mixed"),
    "fp16": ("float16", "half", "16", "16-mixed"),
}
"""Names of the precision of products in other libraries.

Names of a precision of the parameters, such as "bf16-true", are not accepted.
"""

_BY_NAME = {name: own for own in PRECISIONS for name in (own, *OTHER_PRECISIONS.get(own, ()))}


def precision_of(value: Any) -> str:
    """Return flatout's name of a precision, such as ``"bf16"`` for ``torch.bfloat16`` and ``"bf16-mixed"``.

    Raises:
        ValueError: ``value`` names no precision.
    """
    own = _BY_NAME.get(str(value).removeprefix("torch.").lower())
    if own is None:
        raise ValueError(f"precision must be 'auto', 'fp32', 'tf32', 'bf16' or 'fp16', got {value!r}")
    return own


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


def check(spec: Spec) -> Choices:
    """Check all arguments, and return the choices that they make.

    Raises:
        TypeError: an argument has an unsupported type.
        ValueError: an argument has a wrong value, or two arguments contradict each other.
    """
    r = spec
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


def resolved(spec: Spec, choices: Choices, ranks: Agreement = ALONE, device: torch.device | None = None) -> Spec:
    """Return checked arguments, with the values that depend on others or on this process.

    Args:
        spec: the arguments.
        choices: result of ``check``.
        ranks: agreement with the ranks that train the same model.
        device: device of this rank, or None if the user or the launcher chooses it.

    Raises:
        ValueError: an argument differs between ranks, or the model is on several GPUs.
    """
    check_same(ranks, spec, choices)
    return replace(
        spec,
        device=device_of(spec.model, spec.device, device),
        lr_rule=_lr_rule(spec, choices),
        deterministic=spec.deterministic or is_reproducible(),
        inference=spec.optimizer is None and not spec.model.training,
        reproducible=is_reproducible() and not spec.deterministic,
        ranks=ranks,
    )


def _lr_rule(spec: Spec, choices: Choices) -> str:
    """Return the argument ``lr_rule``, or for "auto" the rule of a given batch size, else the optimizer's."""
    if spec.lr_rule != "auto":
        return spec.lr_rule
    if spec.optimizer is None:
        return "none"
    size = choices.of(BATCH_SIZE)
    return (isinstance(size, Mapping) and size.get("lr_rule")) or rule_for(spec.optimizer)


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


def check_schedule(spec: Spec) -> None:
    """Reject an optimizer or a scheduler that ``run.step`` cannot step, and arguments that need an optimizer.

    Raises:
        TypeError: ``scheduler`` has no ``step`` method.
        ValueError: an argument needs an optimizer, or ``run.step`` cannot step the optimizer or the scheduler.
    """
    if spec.optimizer is None:
        for name in spec.run_step_arguments:
            raise ValueError(f"{name} is used by run.step, which needs an optimizer. Give an optimizer to optimize()")
        return
    if isinstance(spec.optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer must step without a closure, got LBFGS. Keep your own loop: "
            "`model, loader = flatout.optimize(model, loader)`"
        )
    if spec.scheduler is not None:
        _check_scheduler(spec.scheduler, spec.optimizer)


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


def check_types(spec: Spec) -> None:
    """Reject objects of the wrong type, and classes in place of their instances.

    Raises:
        TypeError: an object is of the wrong type.
        ValueError: ``loss_fn`` and ``compute_loss`` are both given.
    """
    r = spec
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


_SAME = (
    "accumulate",
    "batch_size",
    "budget",
    "deterministic",
    "expected_steps",
    "lr_rule",
    "max_grad_norm",
    "memory_limit",
)
"""Arguments of ``optimize`` that change the trials."""


def check_same(ranks: Agreement, spec: Spec, choices: Choices) -> None:
    """Reject arguments that differ between ranks, because all ranks must make the same trials.

    Raises:
        ValueError: an argument differs. The message names it.
    """
    if ranks.size == 1:
        return
    arguments = {name: repr(getattr(spec, name)) for name in _SAME}
    arguments["plan"] = repr(spec.plan == CACHED)
    arguments["techniques"] = json.dumps(
        dict(choices.values), sort_keys=True, default=lambda value: type(value).__name__
    )
    given = ranks.every(arguments)
    for name in arguments:
        values = [each[name] for each in given]
        if len(set(values)) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be the same on all ranks, got {shown}. Or pass parallel='none'")


P = ParamSpec("P")
R = TypeVar("R")

OTHER_KEYWORDS = {
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
    for code, names in OTHER_KEYWORDS.items():
        if name in names and code.partition("=")[0] in known:
            return f"Write {code}"
    if any(name == technique.name for technique in REGISTRY):
        return f"Write techniques={{{name!r}: {value!r}}}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}=?" if close else f"Choose from {', '.join(known)}"

"""Arguments of ``flatout.optimize``, and choices of the user and of a plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core import formatting
from flatout.data.loaders import is_rewindable
from flatout.plan import CACHED, Plan
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
from flatout.training.spec import LossWeight


@dataclass(frozen=True, eq=False)
class Request:
    """Arguments of :func:`flatout.optimize`, which documents them, and ``Spec.is_recorded``."""

    model: nn.Module
    loader: Iterable[Any]
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None
    loss_weight: LossWeight | None = None
    scheduler: Any = None
    device: torch.device | str | None = None
    precision: str | torch.dtype = "auto"
    batch_size: str | int = "keep"
    lr_rule: str = "auto"
    memory_limit: int | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    deterministic: bool = False
    seed: int | None = None
    techniques: Mapping[str, Any] | None = None
    expected_steps: int | None = None
    budget: float | None = None
    plan: Plan | str | Path | None = CACHED
    parallel: str = "auto"
    is_recorded: bool = False

    @property
    def modules(self) -> list[nn.Module]:
        """Model and loss modules."""
        return [m for m in (self.model, self.loss_fn, self.compute_loss) if isinstance(m, nn.Module)]

    @property
    def is_inference(self) -> bool:
        """True for a model in eval mode without an optimizer."""
        return self.optimizer is None and not self.model.training

    @property
    def given_plan(self) -> Plan | str | Path | None:
        """Plan that the user gave, which is applied exactly; None if trials or the cache decide."""
        return None if self.plan == CACHED else self.plan

    @property
    def run_step_arguments(self) -> dict[str, Any]:
        """Given arguments that only ``run.step`` uses."""
        given = {
            "scheduler": self.scheduler,
            "max_grad_norm": self.max_grad_norm,
            "accumulate": None if self.accumulate == 1 else self.accumulate,
            "loss_weight": self.loss_weight,
            "batch_size": None if self.batch_size == "keep" else self.batch_size,
            "memory_limit": self.memory_limit,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def measures(self) -> bool:
        """True if trials may run. Otherwise, no plan is read from the cache or written to the cache."""
        return self.budget != 0 and self.given_plan is None


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

OTHER_NAMES = {
    "fp32": ("float32", "float", "32", "32-true", "no"),
    "tf32": ("tensorfloat32",),
    "bf16": ("bfloat16", "bf16-mixed"),
    "fp16": ("float16", "half", "16", "16-mixed"),
}
"""Names of the precision of products in other libraries.

Names of a precision of the parameters, such as "bf16-true", are not accepted.
"""

_BY_NAME = {name: own for own in PRECISIONS for name in (own, *OTHER_NAMES.get(own, ()))}


def precision_of(value: Any) -> str:
    """Return flatout's name of a precision, such as ``"bf16"`` for ``torch.bfloat16`` and ``"bf16-mixed"``.

    Raises:
        ValueError: ``value`` names no precision.
    """
    own = _BY_NAME.get(str(value).removeprefix("torch.").lower())
    if own is None:
        raise ValueError(f"precision must be 'auto', 'fp32', 'tf32', 'bf16' or 'fp16', got {value!r}")
    return own

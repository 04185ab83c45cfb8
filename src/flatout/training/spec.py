"""Specification of a training: the user's arguments of ``optimize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.gradients import trained_parameters
from flatout.distributed.agreement import ALONE, Agreement

LossWeight = Callable[[Any], float | Tensor]
"""``(batch) -> weight``, as a number or a 0-dim tensor. The loss of a batch is a mean over ``weight`` elements."""


CACHED = "cached"
"""Value of ``optimize(plan=...)`` for the plan that an earlier start has saved in the user's cache."""


@dataclass(frozen=True, eq=False)
class Spec:
    """Arguments of :func:`flatout.optimize`, which documents them, and facts of this process. The fields never change.

    ``resolved`` in ``tuning/arguments.py`` replaces arguments whose value depends on others or on the process:
    ``device``, ``lr_rule`` and ``deterministic``. It also sets ``inference``, ``reproducible`` and ``ranks``.

    Attributes:
        device: device of the steps.
        lr_rule: rule of the learning rates for another batch size, one of ``LR_RULES``.
        deterministic: True if only bit-identical techniques may be chosen by timing.
        plan: ``CACHED``, a ``Plan``, the path of a saved plan, or None.
        inference: True if a step is only a forward.
        is_recorded: True if the batches are recorded calls of a script, which keeps its own loop and its own loaders.
        reproducible: True if ``deterministic`` is set because :func:`flatout.reproducible` is in force, which has
            already set torch's flags.
        ranks: agreement with the other ranks of a data-parallel training. All ranks run the same trials together.
    """

    model: nn.Module
    loader: Iterable[Any]
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None
    loss_weight: LossWeight | None = None
    scheduler: Any = None
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
    plan: Any = CACHED
    parallel: str = "auto"
    inference: bool = False
    is_recorded: bool = False
    reproducible: bool = False
    ranks: Agreement = ALONE

    @property
    def modules(self) -> list[nn.Module]:
        """Model and loss modules, which have all parameters and buffers that a step may use."""
        return [m for m in (self.model, self.loss_fn, self.compute_loss) if isinstance(m, nn.Module)]

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters of ``modules`` that may get gradients, each once."""
        return trained_parameters(self.modules)

    @property
    def code(self) -> list[Any]:
        """The user's modules and functions that a step calls."""
        functions = (self.loss_fn, self.compute_loss, self.loss_weight)
        return [self.model, *(function for function in functions if function is not None)]

    @property
    def resizes(self) -> bool:
        """True for ``batch_size="auto"``, which allows to replace the loader by one with a faster batch size."""
        return self.batch_size == "auto" and self.given_plan is None

    @property
    def given_plan(self) -> Any:
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


def device_of(model: nn.Module, wanted: torch.device | str | None, of_rank: torch.device | None = None) -> torch.device:
    """Return the requested device, else the rank's device, else the model's GPU, else the current GPU, else the CPU.

    Args:
        model: a model on one GPU at most.
        wanted: the argument ``device``. A GPU without a number means the GPU of this rank.
        of_rank: device of this rank under ``torchrun``, or None without ``torchrun``.

    Raises:
        ValueError: no device is requested, and the model is on several GPUs.
    """
    given = None if wanted is None else torch.device(wanted)
    if of_rank is not None and (given is None or (given.type == of_rank.type and given.index is None)):
        return of_rank
    if given is not None:
        return given
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model must be on one GPU, got parameters on {names}. Call model.to('cuda')")
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

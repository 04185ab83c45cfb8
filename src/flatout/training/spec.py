"""Specification of a training by the user's arguments of ``optimize``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.gradients import trained_parameters
from flatout.distributed.agreement import ALONE, Agreement

LossWeight = Callable[[Any], float | Tensor]
"""``(batch) -> weight``, as a number or a 0-dim tensor. The loss of a batch is a mean over ``weight`` elements."""


@dataclass(frozen=True, eq=False)
class Spec:
    """Model, optimizer, loss and settings of a training. The fields never change.

    Attributes:
        model: the user's module.
        device: device of the steps.
        optimizer: the user's optimizer, or None if it is not tuned, and for inference.
        loss_fn: ``(output, target) -> loss``.
        compute_loss: ``(model, batch) -> loss``, for batches that ``loss_fn`` does not fit.
        loss_weight: function for the weight of the loss of a batch or its part, or None for the number of samples.
        inference: True if a step is only a forward.
        is_recorded: True if the batches are recorded calls of a script, which keeps its own loop and its own loaders.
        accumulate: batches per update.
        resizes: True for ``batch_size="auto"``, which allows to replace the loader by one with a faster batch size.
        lr_rule: rule of the learning rates for another batch size, one of ``LR_RULES``.
        memory_limit: bytes that training may take, or None for the memory of the device.
        max_grad_norm: global gradient norm to clip to, or None for no clipping.
        deterministic: True if only bit-identical techniques may be chosen by timing.
        reproducible: True if ``deterministic`` is set because :func:`flatout.reproducible` is in force, which has
            already set torch's flags.
        ranks: agreement with the other ranks of a data-parallel training. All ranks run the same trials together.
    """

    model: nn.Module
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    compute_loss: Callable[[nn.Module, Any], Tensor] | None = None
    loss_weight: LossWeight | None = None
    inference: bool = False
    is_recorded: bool = False
    accumulate: int = 1
    resizes: bool = False
    lr_rule: str = "none"
    memory_limit: int | None = None
    max_grad_norm: float | None = None
    deterministic: bool = False
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

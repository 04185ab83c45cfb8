"""Technique 5 of the checklist: model, buffers, loss module and its weights on one device, moved together."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from flatout.techniques.base import Rule
from flatout.techniques.candidate import Candidate

if TYPE_CHECKING:
    from flatout.training.job import Job


class Placement(Candidate):
    """Candidate that moves modules, together with the optimizer's state, to a device and back."""

    def __init__(self, job: Job) -> None:
        self.label = self.value = str(job.spec.device)
        optimizer = job.spec.optimizer
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)  # the model keeps this candidate
        self._device = job.spec.device
        # Tensors, not modules, so that the candidate does not keep the model alive.
        tensors = [t for module in job.spec.modules for t in (*module.parameters(), *module.buffers())]
        if optimizer is not None:
            tensors += [p for group in optimizer.param_groups for p in group["params"]]
        self._moved = [(t, t.device) for t in {id(t): t for t in tensors}.values() if t.device != job.spec.device]

    def _turn_on(self) -> None:
        self._move([(t, self._device) for t, _ in self._moved])

    def _turn_off(self) -> None:
        self._move(self._moved)

    def _move(self, targets: list[tuple[torch.Tensor, torch.device]]) -> None:
        for tensor, device in targets:
            tensor.data = tensor.data.to(device)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(device)
            for key, value in self._state_of(tensor).items():
                # torch keeps `step` on the CPU for parameters on any device.
                if isinstance(value, torch.Tensor) and key != "step":
                    value.data = value.data.to(device)

    def _state_of(self, tensor: torch.Tensor) -> dict[str, Any]:
        optimizer = None if self._optimizer is None else self._optimizer()
        return {} if optimizer is None else optimizer.state.get(tensor, {})


class Criterion(Rule):
    """Moves the model and the loss function (the criterion) to the device that training runs on.

    When it helps: a loss module with class weights on the CPU either raises or copies them in every step.
    """

    name = "criterion"
    number = 5
    title = "criterion on the device"
    expected = "1–3 %"
    rationale = "model, buffers and loss weights live on one device: no copy between devices inside a step"

    def candidate(self, job: Job) -> Candidate:
        """Return the candidate, which does nothing if everything is on the device."""
        return Placement(job)

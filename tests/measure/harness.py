"""Parts of the tuner that tests drive one by one, without a call of ``optimize``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flatout.job import Job
from flatout.techniques import StepTechnique, Switch


def job_of(
    model: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    compute_loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    **settings: Any,
) -> Job:
    """Return the job that ``optimize`` would make of these arguments on the CPU, with cross-entropy for a loss."""
    return Job(
        model=model,
        loader=batches,
        source=batches,
        optimizer=optimizer,
        loss_fn=functional.cross_entropy if compute_loss is None else None,
        compute_loss=compute_loss,
        device=torch.device("cpu"),
        **settings,
    )


class Change(Switch):
    """Candidate that is turned on and off by two functions."""

    def __init__(self, label: str, on: Callable[[], object], off: Callable[[], object]) -> None:
        self.label = self.value = label
        self._on, self._off = on, off

    def _turn_on(self) -> None:
        self._on()

    def _turn_off(self) -> None:
        self._off()


class Candidate(StepTechnique):
    """Technique of one candidate, whose numerics are checked. Subclasses define ``change``."""

    name = "candidate"
    title = "a candidate"
    kept_because = "it is fast"
    expected = "2x"
    is_verified = True

    def change(self, job: Job) -> Switch:
        """Return the candidate."""
        raise NotImplementedError

    def candidates(self, job: Job) -> Sequence[Switch]:
        return [self.change(job)]

    def forced(self, job: Job, value: Any) -> Switch:
        return self.change(job)

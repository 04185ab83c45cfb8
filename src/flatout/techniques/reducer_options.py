"""Shared code of the techniques that change how the gradients of several ranks are averaged during the backward."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatout.techniques.base import NotApplicable
from flatout.techniques.candidate import Candidate

if TYPE_CHECKING:
    from flatout.training.job import Job


class ReducerCandidate(Candidate):
    """Candidate that sets some of the ``ReducerOptions`` of the training's ``GradientSync``, for the next step.

    Args:
        job: the training.
        label: as in ``Candidate``.
        value: as in ``Candidate``.
        options: the options by name.
    """

    def __init__(self, job: Job, label: str, value: Any, **options: Any) -> None:
        self.label = label
        self.value = value
        self._stepper = weakref.ref(job.stepper)
        self._options = options
        self._before: dict[str, Any] = {}

    def _turn_on(self) -> None:
        self._before = self._replaced(self._options)

    def _turn_off(self) -> None:
        self._replaced(self._before)

    def _replaced(self, options: dict[str, Any]) -> dict[str, Any]:
        """Set options, and return their earlier values."""
        stepper = self._stepper()
        if stepper is None or stepper.sync is None:
            return {}
        before = {name: getattr(stepper.sync.options, name) for name in options}
        stepper.sync.options = replace(stepper.sync.options, **options)
        return before


def check_reducer(job: Job) -> None:
    """Require several ranks that average the gradients during the backward of ``run.step``.

    A user's own loop may hold gradients longer than a step. If its graph changes, flatout cannot repeat the step.

    Raises:
        NotApplicable: gradients are not averaged in this way.
    """
    stepper = job.stepper
    if job.spec.ranks.size == 1:
        raise NotApplicable("this is one process, whose gradients need no averaging")
    if job.why_no_step:
        raise NotApplicable(f"{job.why_no_step}: flatout cannot repeat a step that fails on one rank")
    if stepper.keeps_gradients or stepper.micro_batches.size is not None:
        raise NotApplicable("gradients are averaged before the update, and not during the backward")
    if job.data.batches and stepper.sync is None:
        raise NotApplicable("the ranks train apart: techniques={'data_parallel': False} does without it")

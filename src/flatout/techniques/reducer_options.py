"""Shared code of the techniques that change how the gradients of several ranks are averaged during the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flatout.techniques.base import NotApplicable
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job


def reducer_candidate(job: Job, label: str, value: Any, **options: Any) -> Candidate:
    """Return the candidate that sets some of the ``ReducerOptions`` of the training's ``GradientSync``.

    Args:
        job: the training.
        label: as in ``Candidate``.
        value: as in ``Candidate``.
        options: the options by name, for the next step.
    """
    reference = weakref.ref(job.stepper)

    def set_options(options: dict[str, Any]) -> Callable[[], object]:
        stepper = reference()
        if stepper is None or stepper.sync is None:
            return dict
        before = {name: getattr(stepper.sync.options, name) for name in options}
        stepper.sync.options = replace(stepper.sync.options, **options)
        return partial(set_options, before)

    return ChangeCandidate(label, value, partial(set_options, options))


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

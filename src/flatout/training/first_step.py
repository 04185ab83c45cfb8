"""Check of a job's first forward, for the type of its loss, writes to its batch, and random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.core.batches import cloned, tensors_of, tensors_within
from flatout.core.errors import ran_out_of_memory
from flatout.core.random_state import RandomState
from flatout.core.reachable import reachable
from flatout.core.saved import parts_of
from flatout.core.snapshot import Snapshot
from flatout.training.job import Job
from flatout.training.loss_suggestion import compute_loss_line, why_not_taken
from flatout.training.objective import MissingLossError, Objective


def check_step(job: Job, state: Snapshot, batch: Any, *, needs_loss: bool = True) -> bool:
    """Run a forward on a copy of the batch, and set what the objective shows of it.

    These are ``writes_batches``, ``draws``, ``draws_on_host`` and ``has_loss``.

    Args:
        job: a job before any technique is applied.
        state: the job's state, which also receives copies of the tensors that the forward writes to.
        batch: a batch on the device.
        needs_loss: True if an unknown loss is an error. Otherwise the user's own loop computes the loss.

    Returns:
        False if the forward of a job with an optimizer ran out of memory, else True.

    Raises:
        TypeError: the model does not accept such batches, the loss is not a tensor, or an output in inference holds no
            tensor.
        ValueError: the loss is unknown, is not a scalar, or does not depend on a trainable parameter.
    """
    given = cloned(batch)
    objects = [part for node in reachable(given) for part in parts_of(node, 0)]
    random = RandomState.capture([*job.spec.modules, *job.spec.code])
    try:
        with state.extended():
            result = job.objective.infer(given) if job.spec.inference else _loss(job.objective, given, needs_loss)
        (_check_output if job.spec.inference else _check_loss)(result)
        del result  # with its graph, so that the next forward has the memory
    except TypeError as error:
        reason = "" if job.spec.compute_loss is not None else why_not_taken(job.spec.model, batch)
        if not reason:
            raise
        line = compute_loss_line(job.spec.model, batch, has_loss_fn=job.spec.loss_fn is not None)
        raise TypeError(f"{reason}. Define the loss: {line}") from error
    except RuntimeError as error:
        if job.spec.optimizer is None or not ran_out_of_memory(error):
            raise
        return False
    finally:
        job.objective.draws = random.moved() is not None
        job.objective.draws_on_host = random.moved(of_torch=False) or ""
        is_written = any(part.changed() for part in objects)
        job.objective.writes_batches = is_written or not all(
            map(_is_same, tensors_within(batch), tensors_within(given))
        )
    return True


def _loss(objective: Objective, batch: Any, needs_loss: bool) -> Tensor:
    try:
        return objective.loss(batch)
    except MissingLossError:
        if needs_loss:
            raise
        objective.has_loss = False
        return objective.loss(batch)


def _check_output(output: Any) -> None:
    if not tensors_of(output):
        raise TypeError("the model's output holds no tensor, so trials cannot check whether a technique changes it")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}")
    if loss.dim() != 0:
        raise ValueError(
            f"the loss must be a scalar (0-dim) tensor, got shape {tuple(loss.shape)}: reduce it, e.g. .mean()"
        )
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter: backward would do nothing")


def _is_same(original: Tensor, copy: Tensor) -> bool:
    """Return True if ``copy``, a clone of ``original``, was not written to.

    Writes through ``.data`` do not change the version counter, so plain tensors are also compared by value.
    """
    if original.shape != copy.shape or original.dtype != copy.dtype:
        return False  # an object's attributes were replaced
    if copy.is_inference() or copy._version:
        return copy.is_inference()
    return copy.layout is not torch.strided or copy.is_nested or torch.equal(original, copy)

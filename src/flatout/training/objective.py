"""Objective of a training, which is forward and loss of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flatout.core.batches import cloned, tensors_of, with_own_containers
from flatout.mfu.counted_calls import is_wrapped
from flatout.training.loss_suggestion import compute_loss_line
from flatout.training.spec import Spec


class MissingLossError(ValueError):
    """Error of a training without a loss function, whose model's output has no ``.loss``."""


class Objective:
    """Forward and loss of a training.

    Args:
        spec: model and loss.

    Attributes:
        compiled: function that replaces ``loss`` in training steps, and may fall back to ``loss``. With None, steps
            call ``loss``.
        writes_batches: True if forward or loss change tensors of their batch in place.
        draws: True if forward or loss draw random numbers, as dropout does.
        draws_on_host: name of a generator of Python or NumPy from which forward or loss draw; empty if there is none.
        python_state: what forward or loss change in Python, such as "attribute 'calls' of a Net"; empty if nothing.
        why_untried: why steps cannot be tried, because they cannot be repeated without a trace; empty if they can.
        has_loss: False if only the user's own loop computes the loss. Trials then use ``stand_in``.
        plain: returns a context in which the model's calls average no gradients over ranks, as the user's calls do.
    """

    compiled: Callable[[Any], Tensor] | None = None
    writes_batches: bool = False
    draws: bool = False
    draws_on_host: str = ""
    python_state: str = ""
    why_untried: str = ""
    has_loss: bool = True
    plain: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss as training steps compute it, with ``compiled`` if it is not None.

        If a counter counts the model's calls, ``compiled`` is not used, because it would hide these calls.
        """
        if self.compiled is None or is_wrapped(self.spec.model):
            return self.loss(batch)
        if self.spec.loss_fn is not None and type(batch) is list:
            batch = tuple(batch)  # so that a loader's list and run.step((x, y)) are compiled once
        with self.plain():
            return self.compiled(self.lent(batch))

    def loss(self, batch: Any) -> Tensor:
        """Run the forward and return the loss of one batch that is on the device.

        Raises:
            TypeError: the batch is neither a pair nor a mapping and there is no ``compute_loss``.
            MissingLossError: ``has_loss`` is True, but there is neither a loss nor an output with ``.loss``.
        """
        spec = self.spec
        with self.plain():
            if spec.compute_loss is not None:
                return spec.compute_loss(spec.model, self.lent(batch))
            output, target = self._forward(batch)
            if spec.loss_fn is not None:
                if target is None:
                    raise TypeError(
                        f"batches must be (x, y) pairs for loss_fn, got {type(batch).__name__}. "
                        f"Replace loss_fn by {compute_loss_line(spec.model, batch, has_loss_fn=True)}"
                    )
                return spec.loss_fn(output, target)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is not None:
            return loss
        if self.has_loss:
            raise MissingLossError(
                f"model must return an output with .loss if there is no loss_fn or compute_loss, got "
                f"{type(output).__name__}. {self.loss_advice(batch)}"
            )
        return stand_in(output)

    def loss_advice(self, batch: Any) -> str:
        """Return the arguments of ``optimize`` that define the loss of such batches."""
        return f"Pass loss_fn, or {compute_loss_line(self.spec.model, batch, has_loss_fn=True)}"

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Return the model's output for one batch, and the target, or None for a batch without a target."""
        with self.plain():
            return self._forward(batch)

    def _forward(self, batch: Any) -> tuple[Any, Any]:
        model, batch = self.spec.model, self.lent(batch)
        if type(batch) in (tuple, list) and len(batch) == 2:  # nearly every batch
            return model(batch[0]), batch[1]
        if isinstance(batch, Mapping):
            return model(**batch), None
        if isinstance(batch, Tensor):
            return model(batch), None
        if isinstance(batch, Sequence) and len(batch) == 2:
            return model(batch[0]), batch[1]
        given = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, Sequence) else "")
        line = compute_loss_line(model, batch, has_loss_fn=self.spec.loss_fn is not None)
        raise TypeError(f"batches must be (x, y) pairs or mappings, got {given}. Define the loss: {line}")

    def infer(self, batch: Any) -> Any:
        """Return the model's output for one batch, or the result of ``compute_loss``, under ``inference_mode``."""
        with torch.inference_mode():
            if self.spec.compute_loss is not None:
                return self.spec.compute_loss(self.spec.model, self.lent(batch))
            return self.forward(batch)[0]

    def lent(self, batch: Any) -> Any:
        """Return a copy of a batch for the user's code, which may pop entries and write to tensors.

        Containers are always copied. Tensors are copied only if ``writes_batches``. The batch itself must not change,
        because trials and recovery from out of memory use it again.
        """
        return cloned(batch) if self.writes_batches else with_own_containers(batch)


def stand_in(output: Any) -> Tensor:
    """Return a loss for trials without a known loss.

    The loss is the sum over outputs of the mean squared distance from 1, as a 0-dim float32 tensor. Unlike a sum of the
    outputs, this loss has a minimum, so updates do not diverge. Outputs of 0 have a gradient, too.
    """
    losses = [(t.float() - 1).square().mean() for t in tensors_of(output) if t.is_floating_point() and t.numel()]
    return torch.stack(losses).sum() if losses else torch.zeros(())

"""Training step of one process: gradients of a batch, and the update after ``accumulate`` batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from flatout.amp import GradScaler
from flatout.core.errors import parameters_of, ran_out_of_memory
from flatout.mfu.ranges import nvtx_range
from flatout.optim import update
from flatout.optim.atomic_update import AtomicUpdate
from flatout.optim.native_step import NativeStep
from flatout.training.autocast import autocast_dtype
from flatout.training.micro_batches import MicroBatches, Part
from flatout.training.objective import Objective
from flatout.training.rank_times import RankTimes
from flatout.training.spec import Spec

if TYPE_CHECKING:
    from flatout.distributed.gradient_sync import GradientSync

PhaseOf = Callable[[str], AbstractContextManager[Any]]
"""``with phase("forward"): ...`` marks a phase of the step for profilers and counters."""


def as_range(phase: str) -> nvtx_range:
    """Return a range that only profilers see."""
    return nvtx_range(f"flatout.{phase}")


class StepRunner(Protocol):
    """Way to run the training step of a batch that is computed whole, in place of ``Stepper.eager_step``."""

    def __call__(self, stepper: Stepper, batch: Any, phase: PhaseOf) -> Tensor:
        """Run the step. Arguments and result are as for :meth:`Stepper.step`."""

    def release(self) -> None:
        """Free memory that is only kept for later steps."""


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return ``loss * weight``, and 0 for weight 0, even if the loss is NaN. Its backward reaches all parameters."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0, loss * weight).to(loss.dtype)
    return loss * weight if weight else (loss * 0).nan_to_num()


def _inverse(count: int | Tensor) -> float | Tensor:
    """Return 1 / count, and 0 for a tensor of 0: all batches of the update have weight 0, and gradients of 0."""
    return torch.where(count == 0, 0.0, 1.0 / count) if isinstance(count, Tensor) else 1.0 / count


@dataclass
class BatchLoss:
    """Loss of a batch, 0-dim, detached. On several ranks, it is the mean over all ranks after the batch."""

    loss: Tensor = field(init=False)


class Stepper:
    """Runner of an objective's training steps, with accumulation of gradients, scaling of losses and updates.

    Args:
        spec: model, optimizer and settings.
        objective: forward and loss of ``spec``.

    Attributes:
        accumulate: batches per update.
        micro_batches: split of a batch that is not computed whole.
        runner: runs the step of a batch that is computed whole, or None for ``eager_step``. A technique sets it.
        sync: averages gradients over the ranks of a data-parallel training. None in a training of one process.
        waits_for_all: True if a step begins on all ranks or on none, as in trials. A rank may fail between two steps.
        times: times of all ranks in the last steps of a data-parallel training.
        note: returns the numbers that this rank sends to the others with every batch.
        notes: the numbers of all ranks, by rank, from the last batch.
        pending: number of batches whose gradients wait for the next update.
        last_loss: loss of the last pending batch, or None if no batch is pending.
        pending_weights: unit and sum of the weights of the pending batches by ``Spec.loss_weight``. The sum is relative
            to the unit, the weight of the first batch, so that gradients keep their size. None if an update is a mean
            over its batches.
    """

    def __init__(self, spec: Spec, objective: Objective) -> None:
        self.spec = spec
        self.objective = objective
        self.accumulate = spec.accumulate
        self.micro_batches = MicroBatches(spec, objective)
        self.runner: StepRunner | None = None
        self.sync: GradientSync | None = None
        self.times = RankTimes()
        self.waits_for_all = False
        self.note: Callable[[], list[float]] = list
        self.notes: list[list[float]] = [[]]
        self.pending = 0
        self.last_loss: Tensor | None = None
        self.pending_weights: tuple[Tensor, Tensor] | None = None
        self._batch_weight: Tensor | None = None
        self._averaged = False
        self._scaler: GradScaler | None = None
        self._guard: AtomicUpdate | None = None

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, or None if the model does not compute in fp16."""
        if autocast_dtype(self.spec.model) is not torch.float16:
            return None
        if self._scaler is None:
            self._scaler = GradScaler(self.spec.device.type)
        return self._scaler

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients are kept after a batch, by accumulation or for parameters that the optimizer lacks."""
        return self.accumulate > 1 or bool(self.not_updated)

    @cached_property
    def not_updated(self) -> Sequence[nn.Parameter]:
        """Trained parameters that the optimizer lacks. Their gradients grow in each step. Empty without one."""
        if self.spec.optimizer is None:
            return ()
        updated = {id(p) for p in parameters_of(self.spec.optimizer)}
        return [p for p in self.spec.trained if id(p) not in updated]

    @property
    def steps_to_settle(self) -> int:
        """Steps until a step has its full speed, after a change that requires a new DDP."""
        return 0

    def weigh(self, batch: Any, loader: Any) -> None:
        """Prepare the weight of the next batch among the batches of all ranks, which ``loader`` may have sliced."""

    def parts(self, batch: Any) -> list[Part]:
        """Return the parts of the next batch, and set its weight in the update."""
        if self.pending == 0:
            self.pending_weights = None
        self._batch_weight = None
        if self.accumulate > 1 and self.spec.loss_weight is not None and not self.micro_batches.sums_losses:
            self._batch_weight = self._weight_in_update(batch)
        return self.micro_batches.parts(batch)

    def _weight_in_update(self, batch: Any) -> Tensor:
        return self._on_device(self.micro_batches.weight_of(batch))

    def _on_device(self, weight: float | Tensor) -> Tensor:
        if not isinstance(weight, Tensor):  # a copy from the host would wait for the device
            return torch.full((), float(weight), device=self.spec.device)
        return weight.detach().to(self.spec.device, torch.float32)

    def step(self, batch: Any, phase: PhaseOf = as_range) -> Any:
        """Run forward, backward and, after ``accumulate`` batches, the update.

        Args:
            batch: a batch on the device.
            phase: entered for the forward, the backward and the update.

        Returns:
            The loss, 0-dim, detached, on the device, not synchronized. In inference, the result of
            ``Objective.infer``.
        """
        if self.spec.inference:
            with phase("forward"):
                return self.objective.infer(batch)
        parts = self.parts(batch)
        if len(parts) == 1:
            return self.step_whole(batch, phase)
        if self.pending == 0:
            self.zero_grad()
        with self.together() as result:
            result.loss = self.micro_batches.add_gradients(parts, lambda part: self.add_gradients(part, phase))
        return self._concluded(result.loss, phase)

    def step_whole(self, batch: Any, phase: PhaseOf = as_range) -> Tensor:
        """Run ``step`` on a batch that is computed whole, after ``parts``."""
        if self.runner is not None:
            return self.runner(self, batch, phase)
        return self.eager_step(batch, phase)

    def eager_step(self, batch: Any, phase: PhaseOf = as_range) -> Tensor:
        """Run ``step_whole`` kernel by kernel."""
        if self.pending == 0:
            self.zero_grad()
        objective = self.objective
        with phase("forward"):
            loss = objective.loss(batch) if objective.compiled is None else objective(batch)
        with phase("backward"):
            self._backward(loss)
        loss = loss.detach()  # frees the graph before the update
        return self._concluded(loss, phase)

    def _concluded(self, loss: Tensor, phase: PhaseOf) -> Tensor:
        """Count a batch whose gradients are complete, update if enough batches are pending, and return the loss."""
        self.count_batch(loss)
        if self.is_due:
            self.flush(phase)
        return loss

    @contextlib.contextmanager
    def together(self) -> Iterator[BatchLoss]:
        """Compute the gradients of a batch inside the block. If the block fails on one rank, it fails on all.

        Yields:
            An object whose ``loss`` the block sets to the loss of this rank. After the block, ``loss`` is the mean over
            all ranks.
        """
        yield BatchLoss()

    def add_gradients(self, part: Part, phase: PhaseOf = as_range) -> Tensor:
        """Run forward and backward of a batch, or of a part of a batch.

        Args:
            part: a part on the device. If its share is 0, its loss may be any value.
            phase: entered for the forward and the backward.

        Returns:
            The loss times the part's share, detached.
        """
        with phase("forward"):
            loss = self._loss_of(part, self.objective)
        with phase("backward"):
            if loss.requires_grad or part.share:
                self._backward(loss)
        return loss.detach()

    def _loss_of(self, part: Part, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Return the loss of a part's batch times its share."""
        share, loss = part.share, loss_of(part.batch)
        if isinstance(share, Tensor):
            return torch.where(share == 0, 0, loss * share).to(loss.dtype)
        if share == 0:
            return torch.zeros_like(loss)
        return loss if share == 1 else loss * share

    def _backward(self, loss: Tensor) -> None:
        if self._batch_weight is not None:
            loss = weighted(loss, self._batch_weight / self._unit)
        (loss if self.scaler is None else self.scaler.scale(loss / self.accumulate)).backward()

    def count_batch(self, loss: Tensor) -> None:
        """Count a batch whose gradients are complete, with its loss."""
        if self._batch_weight is not None:
            unit = self._unit
            total = self._batch_weight / unit
            self.pending_weights = unit, total if self.pending_weights is None else self.pending_weights[1] + total
        self.pending += 1
        self.last_loss = loss

    @property
    def _unit(self) -> Tensor:
        """Unit of the weights of the present update: the first batch's weight, or 1 if this weight is 0."""
        if self.pending_weights is not None:
            return self.pending_weights[0]
        assert self._batch_weight is not None
        return torch.where(self._batch_weight == 0, 1.0, self._batch_weight)

    @property
    def is_due(self) -> bool:
        """True if enough batches are pending for an update."""
        return self.pending == self.accumulate

    def flush(self, phase: PhaseOf = as_range) -> bool:
        """Update with the mean of the gradients of all pending batches, weighted by ``Spec.loss_weight`` if given.

        Args:
            phase: entered for the update.

        Returns:
            False if no batch was pending.

        Raises:
            torch.OutOfMemoryError: memory ran out. The batches are still pending, so ``flush`` may be called again.
            flatout.optim.PartialUpdateError: memory ran out after some parameters had changed.
        """
        optimizer, batches, self.pending = self.spec.optimizer, self.pending, 0
        if batches == 0 or optimizer is None:
            return False
        watch: AtomicUpdate | None = None
        try:
            self._average_over_ranks()
            watch = self._atomic_update(optimizer)
            with phase("update"), watch or contextlib.nullcontext():
                self._update(optimizer, batches)
        except Exception as error:
            if ran_out_of_memory(error):
                self.pending = batches
                self._averaged |= watch is not None and watch.has_rewritten_gradients
            raise
        self._averaged, self.last_loss = False, None
        return True

    def _average_over_ranks(self) -> None:
        """Average the gradients over the ranks, unless the backward has done this."""

    def _atomic_update(self, optimizer: torch.optim.Optimizer) -> AtomicUpdate | None:
        """Return the guard of an update, or None for flatout's optimizers, which allocate before they write."""
        if isinstance(optimizer, NativeStep):
            return None
        if self._guard is None or self._guard.optimizer is not optimizer:
            self._guard = AtomicUpdate(optimizer)
        return self._guard

    def _update(self, optimizer: torch.optim.Optimizer, batches: int) -> None:
        max_norm, count = self.spec.max_grad_norm, self._batches_in_update(batches)
        if self.scaler is not None:
            # The backward has divided by ``accumulate``.
            if (isinstance(count, Tensor) or count < self.accumulate) and not self._averaged:
                grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
                torch._foreach_mul_(grads, self.accumulate * _inverse(count))
                self._averaged = True
            # The lazy form moves 4 bytes per parameter less, even without clipping.
            self.scaler.step(optimizer, max_grad_norm=math.inf if max_norm is None else max_norm)
            self.scaler.update()
        else:
            # A script divides its losses.
            is_mean = (not isinstance(count, Tensor) and count == 1) or self._averaged or self.spec.is_recorded
            if is_mean and max_norm is None:
                optimizer.step()
            else:
                inv_scale = None if is_mean else _inverse(count)
                update(optimizer, inv_scale=inv_scale, max_grad_norm=max_norm, skip_nonfinite=False)

    def _batches_in_update(self, batches: int) -> int | Tensor:
        """Return the divisor of the sum of the pending gradients."""
        return batches if self.pending_weights is None else self.pending_weights[1]

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        optimizer = self.spec.optimizer
        if optimizer is None:
            self.spec.model.zero_grad(set_to_none=True)
        elif type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad(set_to_none=True)
        else:  # torch's method without its range for profilers, which takes a tenth of the time that run.step adds
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    @contextlib.contextmanager
    def whole_updates(self) -> Iterator[None]:
        """Make every step, inside the block, an eager update on a batch that is computed whole."""
        before = self.accumulate, self.micro_batches.size, self.runner
        self.accumulate, self.micro_batches.size, self.runner = 1, None, None
        self.abandon()
        try:
            yield
        finally:
            self.abandon()
            self.accumulate, self.micro_batches.size, self.runner = before

    def reset(self) -> None:
        """Discard pending batches, the loss scaler and the times of ranks."""
        self.pending = 0
        self._averaged = False
        self._scaler = None
        self.times.clear()

    def abandon(self) -> None:
        """Discard pending batches and an unfinished step. The loss scale does not change."""
        self.pending = 0
        self._averaged = False
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

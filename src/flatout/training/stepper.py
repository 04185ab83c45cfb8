"""Training step: gradients of a batch, and the update after ``accumulate`` batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatout.amp import GradScaler
from flatout.core.batches import batch_size_of
from flatout.core.out_of_memory import parameters_of, ran_out_of_memory
from flatout.data.order import BatchShare
from flatout.distributed.agreement import STEP, Message
from flatout.distributed.gradient_sync import GradientSync
from flatout.distributed.step_clock import TIMES
from flatout.mfu.ranges import nvtx_range
from flatout.optim import update
from flatout.optim.atomic_update import AtomicUpdate
from flatout.optim.native_step import NativeStep
from flatout.training.autocast import autocast_dtype
from flatout.training.micro_batches import MicroBatches, Part
from flatout.training.objective import Objective
from flatout.training.rank_times import RankTimes
from flatout.training.spec import Spec

PhaseOf = Callable[[str], AbstractContextManager[Any]]
"""``with phase("forward"): ...`` marks a phase of the step for profilers and counters."""


def as_range(phase: str) -> nvtx_range:
    """Return a range that only profilers see."""
    return nvtx_range(f"flatout.{phase}")


class StepRunner(Protocol):
    """Way to run the training step of a batch that is computed whole."""

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


class BatchLoss:
    """Loss of a batch on all ranks.

    Args:
        stepper: runs the step.
        message: to the other ranks.

    Attributes:
        loss: 0-dim, detached.
    """

    loss: Tensor

    def __init__(self, stepper: Stepper, message: Message) -> None:
        self._stepper = stepper
        self._message = message

    def send(self) -> None:
        """Send ``loss``, the times and the notes of this rank to the others. The step must not fail after this."""
        stepper = self._stepper
        if self._message.is_sent or stepper.sync is None:
            return
        on_host = [self.loss.item()] if stepper.spec.device.type == "cpu" else []
        self._message.values = [*stepper.sync.clock.take(), *stepper.note(), *on_host]
        self._message.send()


class _Eager:
    """Runner of a step kernel by kernel."""

    def __call__(self, stepper: Stepper, batch: Any, phase: PhaseOf) -> Tensor:
        return stepper.eager_step([Part(batch)], phase)

    def release(self) -> None:
        """Do nothing."""


EAGER: StepRunner = _Eager()


class Stepper:
    """Runner of an objective's training steps, with accumulation of gradients, scaling of losses and updates.

    Args:
        spec: model, optimizer and settings.
        objective: forward and loss of ``spec``.

    Attributes:
        accumulate: batches per update.
        micro_batches: split of a batch that is not computed whole.
        runner: runs the step of a batch that is computed whole. Techniques replace this runner.
        sync: averages gradients over the ranks of a data-parallel training. None in a training of one process.
        waits_for_all: True if a step begins on all ranks or on none, as in trials. A rank may fail between two steps.
        weight: weight of the loss of the present batch on this rank, or 1 if all ranks have as many samples.
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
        self.runner = EAGER
        self.sync: GradientSync | None = None
        self.times = RankTimes()
        self.waits_for_all = False
        self.weight: float | Tensor = 1.0
        self.note: Callable[[], list[float]] = list
        self.notes: list[list[float]] = [[]]
        self.pending = 0
        self.last_loss: Tensor | None = None
        self.pending_weights: tuple[Tensor, Tensor] | None = None
        self._weight_of_all: Tensor | None = None
        self._batch_weight: Tensor | None = None
        self._averaged = False
        self._is_synchronized = False
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
    def averages_in_backward(self) -> bool:
        """True if a step averages its gradients over the ranks during the backward, and not before the update.

        The limit of parts decides. The number of parts may differ, because one rank may have a sample more. If
        gradients of earlier batches are kept, the backward would average them even if this batch fails.
        """
        return self.sync is not None and self.micro_batches.size is None and not self.keeps_gradients

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
        return self.sync.steps_to_settle if self.sync is not None and self.averages_in_backward else 0

    def weigh(self, batch: Any, share: BatchShare | None) -> None:
        """Set ``weight`` for the next batch, so that the mean over all ranks is the loss of the whole batch.

        Args:
            batch: the batch of this rank.
            share: share of this rank in the whole batch, or None if each rank has its own batches.
        """
        if self.sync is None:
            return
        self._weight_of_all = None
        if share is not None and batch_size_of(batch) != max(share.own, 1):
            share = None  # not the loader's last batch
        ranks, own = self.spec.ranks.size, 1 if share is None else share.own
        if self.spec.loss_weight is not None:
            self._weight_of_all, self.weight = self.sync.relative(
                self._on_device(self._loss_weight(batch) if own else 0)
            )
        elif share is None:
            self.weight = 1.0
        elif self.micro_batches.sums_losses:
            self.weight = float(ranks if own else 0)
        else:
            self.weight = own * ranks / share.total

    def _loss_weight(self, batch: Any) -> float | Tensor:
        return self.micro_batches.weight_of(batch)

    def _on_device(self, weight: float | Tensor) -> Tensor:
        if not isinstance(weight, Tensor):  # a copy from the host would wait for the device
            return torch.full((), float(weight), device=self.spec.device)
        return weight.detach().to(self.spec.device, torch.float32)

    def parts(self, batch: Any) -> list[Part]:
        """Return the parts of the next batch, and set its weight in the update."""
        if self.pending == 0:
            self.pending_weights = None
        self._batch_weight, of_all = None, self._weight_of_all
        self._weight_of_all = None
        if self.accumulate > 1 and self.spec.loss_weight is not None and not self.micro_batches.sums_losses:
            # Trial steps of several ranks have no weight that all ranks know.
            weight = self._on_device(self._loss_weight(batch)) if self.sync is None else of_all
            self._batch_weight = torch.ones((), device=self.spec.device) if weight is None else weight
        return self.micro_batches.parts(batch)

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
        return self.step_in_parts(self.parts(batch), phase)

    def step_in_parts(self, parts: Sequence[Part], phase: PhaseOf = as_range) -> Tensor:
        """Run ``step`` on a batch that ``micro_batches`` has split."""
        if len(parts) == 1:
            return self.runner(self, parts[0].batch, phase)
        return self.eager_step(parts, phase)

    def eager_step(self, parts: Sequence[Part], phase: PhaseOf = as_range) -> Tensor:
        """Run a training step kernel by kernel on the parts of a batch."""
        if self.pending == 0:
            self.zero_grad()
        if self.sync is None:
            loss = self._of_parts(parts, phase)
        elif self.averages_in_backward:
            loss = self._synchronized(self.sync, parts[0], phase)
        else:
            with self.together() as batch:
                batch.loss = self._of_parts(parts, phase)
            loss = batch.loss
        self.count_batch(loss)
        if self.is_due:
            self.flush(phase)
        return loss

    def _of_parts(self, parts: Sequence[Part], phase: PhaseOf) -> Tensor:
        return self.micro_batches.add_gradients(parts, lambda part: self.add_gradients(part, phase))

    def _synchronized(self, sync: GradientSync, part: Part, phase: PhaseOf) -> Tensor:
        """Run ``add_gradients`` with gradients averaged over all ranks during the backward.

        Raises:
            RankFailure: a rank failed. All ranks may take another step.
        """
        if self.waits_for_all:
            self.spec.ranks.check()
            sync.refresh()
        try:
            with self.together() as batch, sync.averaged():
                self._add_averaged_gradients(sync, part, phase, batch)
        except Exception:
            sync.reset()
            raise
        self._is_synchronized = True
        return batch.loss

    def _add_averaged_gradients(self, sync: GradientSync, part: Part, phase: PhaseOf, batch: BatchLoss) -> None:
        # A function, so that no other frame holds the graph when the backward has run out of memory.
        with phase("forward"):
            loss = self._loss_of(part, partial(sync.run, self.objective))
        batch.loss = loss.detach()
        sync.when_certain(loss, batch.send)
        with phase("backward"):
            self._backward(loss)

    @contextlib.contextmanager
    def together(self) -> Iterator[BatchLoss]:
        """Compute the gradients of a batch inside the block. If the block fails on one rank, it fails on all.

        ``flush`` averages the gradients over the ranks, unless the block has done this.

        Yields:
            An object whose ``loss`` the block sets to the loss of this rank. After the block, ``loss`` is the mean over
            all ranks.
        """
        if self.sync is None:
            yield BatchLoss(self, Message())
            return
        self._is_synchronized = False
        self.sync.clock.begin()
        with self.spec.ranks.attempt(STEP) as message:
            batch = BatchLoss(self, message)
            yield batch
            self.sync.clock.end()
            batch.send()
        self.times.add([row[:TIMES] for row in message.received])
        self.notes = [row[TIMES:] for row in message.received]
        if self.spec.device.type == "cpu":
            losses = [row.pop() for row in self.notes]
            batch.loss = torch.full((), sum(losses) / len(losses), dtype=batch.loss.dtype, device="cpu")
        else:
            batch.loss = self.sync.mean(batch.loss)

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
        """Return the loss of a part's batch times its share and the weight of this rank."""
        share, loss = part.share, loss_of(part.batch)
        if isinstance(share, Tensor):
            loss = torch.where(share == 0, 0, loss * share).to(loss.dtype)
        elif share == 0:
            loss = torch.zeros_like(loss)
        elif share != 1:
            loss = loss * share
        if isinstance(self.weight, Tensor) or self.weight != 1:
            loss = weighted(loss, self.weight)
        return loss

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
            if self.sync is not None and not self._is_synchronized:
                with self.sync.clock.waiting():
                    self.sync.reduce()
                self._is_synchronized = True
            watch = self._atomic_update(optimizer)
            with phase("update"), watch or contextlib.nullcontext():
                self._update(optimizer, batches)
        except Exception as error:
            if ran_out_of_memory(error):
                self.pending = batches
                self._averaged |= watch is not None and watch.has_rewritten_gradients
            raise
        self._averaged, self._is_synchronized, self.last_loss = False, False, None
        return True

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
            inv_scale = None if is_mean else _inverse(count)
            update(optimizer, inv_scale=inv_scale, max_grad_norm=max_norm, skip_nonfinite=False)

    def _batches_in_update(self, batches: int) -> int | Tensor:
        """Return the divisor of the sum of the pending gradients."""
        return batches if self.pending_weights is None else self.pending_weights[1]

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        owner = self.spec.model if self.spec.optimizer is None else self.spec.optimizer
        owner.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Make the steps of this rank, inside the block, steps without the other ranks, whose gradients they lack."""
        sync, self.sync = self.sync, None
        assert sync is not None
        try:
            with sync.alone():
                yield
        finally:
            self.sync = sync

    @contextlib.contextmanager
    def whole_updates(self) -> Iterator[None]:
        """Make every step, inside the block, an eager update on a batch that is computed whole."""
        before = self.accumulate, self.micro_batches.size, self.runner
        self.accumulate, self.micro_batches.size, self.runner = 1, None, EAGER
        self.abandon()
        try:
            yield
        finally:
            self.abandon()
            self.accumulate, self.micro_batches.size, self.runner = before

    @property
    def progress(self) -> tuple[int, GradScaler | None]:
        """Pending batches, and the loss scaler: the state of a training that a ``Snapshot`` does not hold."""
        return self.pending, self._scaler

    @progress.setter
    def progress(self, progress: tuple[int, GradScaler | None]) -> None:
        self.pending, self._scaler = progress

    def reset(self) -> None:
        """Discard pending batches, the loss scaler and the times of ranks."""
        self.pending = 0
        self._averaged = self._is_synchronized = False
        self._scaler = None
        self.times.clear()

    def abandon(self) -> None:
        """Discard pending batches and an unfinished step. The loss scale does not change."""
        self.pending = 0
        self._averaged = self._is_synchronized = False
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

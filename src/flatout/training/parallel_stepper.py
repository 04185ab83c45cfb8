"""Training step of one rank of a data-parallel training, whose gradients are averaged over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.core.batches import batch_size_of
from flatout.data.order import BatchShare
from flatout.distributed.agreement import STEP
from flatout.distributed.gradient_sync import GradientSync
from flatout.distributed.step_clock import TIMES
from flatout.training.micro_batches import Part
from flatout.training.objective import Objective
from flatout.training.spec import Spec
from flatout.training.stepper import BatchLoss, PhaseOf, Stepper, as_range, weighted


@dataclass
class _SentLoss(BatchLoss):
    """Loss of a batch that a rank sends to the others.

    Attributes:
        send: sends ``loss``, the times and the notes of this rank. The step must not fail after this call.
    """

    send: Callable[[], None] = lambda: None


class ParallelStepper(Stepper):
    """Stepper of one of several ranks. Without ``sync``, its steps are those of one process.

    Attributes:
        weight: weight of the loss of the present batch on this rank, or 1 if all ranks have as many samples.
    """

    def __init__(self, spec: Spec, objective: Objective) -> None:
        super().__init__(spec, objective)
        self.weight: float | Tensor = 1.0
        self._weight_of_all: Tensor | None = None
        self._is_synchronized = False

    @property
    def averages_in_backward(self) -> bool:
        """True if a step averages its gradients over the ranks during the backward, and not before the update.

        The limit of parts decides. The number of parts may differ, because one rank may have a sample more. If
        gradients of earlier batches are kept, the backward would average them even if this batch fails.
        """
        return self.sync is not None and self.micro_batches.size is None and not self.keeps_gradients

    @property
    def steps_to_settle(self) -> int:
        """Steps until a step has its full speed, after a change that requires a new DDP."""
        return self.sync.steps_to_settle if self.sync is not None and self.averages_in_backward else 0

    def weigh(self, batch: Any, loader: Any) -> None:
        """Set ``weight`` for the next batch, so that the mean over all ranks is the loss of the whole batch.

        Args:
            batch: the batch of this rank.
            loader: the loader of the training. If it slices batches, it has the share of this rank in its last batch.
        """
        if self.sync is None:
            return
        self._weight_of_all = None
        share: BatchShare | None = getattr(loader, "share", None)
        if share is not None and batch_size_of(batch) != max(share.own, 1):
            share = None  # not the loader's last batch
        ranks, own = self.spec.ranks.size, 1 if share is None else share.own
        if self.spec.loss_weight is not None:
            weight = self.micro_batches.weight_of(batch) if own else 0
            self._weight_of_all, self.weight = self.sync.relative(self._on_device(weight))
        elif share is None:
            self.weight = 1.0
        elif self.micro_batches.sums_losses:
            self.weight = float(ranks if own else 0)
        else:
            self.weight = own * ranks / share.total

    def parts(self, batch: Any) -> list[Part]:
        """Return the parts of the next batch, and set its weight in the update."""
        try:
            return super().parts(batch)
        finally:
            self._weight_of_all = None

    def _weight_in_update(self, batch: Any) -> Tensor:
        if self.sync is None:
            return super()._weight_in_update(batch)
        # Trial steps have no weight that all ranks know.
        return torch.ones((), device=self.spec.device) if self._weight_of_all is None else self._weight_of_all

    def eager_step(self, batch: Any, phase: PhaseOf = as_range) -> Tensor:
        """Run ``step_whole`` kernel by kernel."""
        if self.sync is None:
            return super().eager_step(batch, phase)
        if self.pending == 0:
            self.zero_grad()
        if self.averages_in_backward:
            result: BatchLoss = self._averaged_in_backward(self.sync, batch, phase)
        else:
            with self.together() as result:
                result.loss = self.add_gradients(Part(batch), phase)
        return self._concluded(result.loss, phase)

    def _averaged_in_backward(self, sync: GradientSync, batch: Any, phase: PhaseOf) -> BatchLoss:
        """Run forward and backward, and average the gradients over all ranks during the backward.

        Raises:
            RankFailure: a rank failed. All ranks may take another step.
        """
        if self.waits_for_all:
            self.spec.ranks.check()
            sync.refresh()
        try:
            with self.together() as result, sync.averaged():
                self._add_averaged_gradients(sync, batch, phase, result)
        except Exception:
            sync.reset()
            raise
        self._is_synchronized = True
        return result

    def _add_averaged_gradients(self, sync: GradientSync, batch: Any, phase: PhaseOf, result: _SentLoss) -> None:
        # A function, so that no other frame holds the graph when the backward has run out of memory.
        with phase("forward"):
            loss = self._loss_of(Part(batch), partial(sync.run, self.objective))
        result.loss = loss.detach()
        sync.when_certain(loss, result.send)
        with phase("backward"):
            self._backward(loss)

    @contextlib.contextmanager
    def together(self) -> Iterator[_SentLoss]:
        """Compute the gradients of a batch inside the block. If the block fails on one rank, it fails on all.

        ``flush`` averages the gradients over the ranks, unless the block has done this.

        Yields:
            An object whose ``loss`` the block sets to the loss of this rank. After the block, ``loss`` is the mean over
            all ranks.
        """
        sync = self.sync
        if sync is None:
            yield _SentLoss()
            return
        self._is_synchronized = False
        sync.clock.begin()
        with self.spec.ranks.attempt(STEP) as message:

            def send() -> None:
                if message.is_sent:
                    return
                on_host = [result.loss.item()] if self.spec.device.type == "cpu" else []
                message.values = [*sync.clock.take(), *self.note(), *on_host]
                message.send()

            result = _SentLoss(send=send)
            yield result
            sync.clock.end()
            send()
        self.times.add([row[:TIMES] for row in message.received])
        self.notes = [row[TIMES:] for row in message.received]
        if self.spec.device.type == "cpu":
            losses = [row.pop() for row in self.notes]
            result.loss = torch.full((), sum(losses) / len(losses), dtype=result.loss.dtype, device="cpu")
        else:
            result.loss = sync.mean(result.loss)

    def _loss_of(self, part: Part, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Return the loss of a part's batch times its share and the weight of this rank."""
        loss = super()._loss_of(part, loss_of)
        return weighted(loss, self.weight) if isinstance(self.weight, Tensor) or self.weight != 1 else loss

    def flush(self, phase: PhaseOf = as_range) -> bool:
        """Run ``Stepper.flush`` with gradients that are averaged over all ranks."""
        is_updated = super().flush(phase)
        if is_updated:
            self._is_synchronized = False
        return is_updated

    def _average_over_ranks(self) -> None:
        if self.sync is None or self._is_synchronized:
            return
        with self.sync.clock.waiting():
            self.sync.reduce()
        self._is_synchronized = True

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

    def reset(self) -> None:
        """Discard pending batches, the loss scaler and the times of ranks."""
        super().reset()
        self._is_synchronized = False

    def abandon(self) -> None:
        """Discard pending batches and an unfinished step. The loss scale does not change."""
        super().abandon()
        self._is_synchronized = False

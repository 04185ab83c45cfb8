"""Gradients of a batch as the sum of the gradients of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.core.batches import batch_size_of, split
from flatout.core.saved import SavedTensor, owned
from flatout.training.objective import Objective
from flatout.training.spec import Spec


def part_sizes(samples: int, most: int) -> list[int]:
    """Return the sizes of the fewest parts of at most ``most`` samples, as even as possible.

    If the batch size is a multiple of 8 and ``most`` is at least 8, the sizes are multiples of 8.

    Args:
        samples: samples of the batch, >= 1.
        most: limit of samples per part, >= 1.
    """
    unit = 8 if samples % 8 == 0 and most >= 8 else 1
    units, parts = samples // unit, -(-samples // (most // unit * unit))
    return [unit * (units // parts + (i < units % parts)) for i in range(parts)]


class Part(NamedTuple):
    """Part of a batch, or a whole batch.

    Attributes:
        batch: the samples.
        samples: number of samples, or 0 for a whole batch, whose samples need not be counted.
        share: factor of the loss, so that the losses of all parts add up to the loss of the batch.
    """

    batch: Any
    samples: int = 0
    share: float | Tensor = 1.0


class MicroBatches:
    """Split of a job's batches into parts.

    The loss of each part is multiplied by its share. Up to rounding, the gradients equal the gradients of the whole
    batch under two conditions. First, the loss is a mean or a known sum over samples, or ``Spec.loss_weight`` gives the
    weights. Second, samples do not depend on each other, as they do in BatchNorm. Batches are only split after
    ``why_parts_differ`` has shown both on a batch. Buffers are updated once, by the mean
    over the parts weighted by samples.

    Attributes:
        size: limit of samples per part, or None for no limit.
    """

    def __init__(self, spec: Spec, objective: Objective) -> None:
        self.size: int | None = None
        self._spec = spec
        self._objective = objective

    @cached_property
    def slots(self) -> list[dict[str, Tensor | None]]:
        """Buffers of each module that has any, by name."""
        return [buffers_of(m) for root in self._spec.modules for m in root.modules() if len(m._buffers)]

    @property
    def weighs_right(self) -> bool:
        """True if the weights of parts are known to fit the loss."""
        return self._spec.loss_weight is not None or _is_mean_over_samples(self._spec.loss_fn)

    @property
    def sums_losses(self) -> bool:
        """True if the loss is known to be a sum over samples."""
        return getattr(self._spec.loss_fn, "reduction", None) == "sum"

    @property
    def sees_parts(self) -> bool:
        """True if a BatchNorm normalizes each part by itself."""
        modules = (m for root in self._spec.modules for m in root.modules())
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in modules)

    def result(self, *differences: str) -> str:
        """Return a phrase that compares the result of parts with the result of the whole batch.

        Args:
            differences: observed differences, in addition to known ones.
        """
        known = ["BatchNorm normalizes each part by itself"] if self.sees_parts else []
        told = ", and ".join([*known, *differences])
        return f"with the same result, except that {told}" if told else "with the same result"

    def parts(self, batch: Any) -> list[Part]:
        """Return the parts of a batch. A batch that is small enough, or cannot be split, is the only part."""
        batches, sizes = self._split(batch)
        return list(map(Part, batches, sizes, self._shares(batches, sizes))) if sizes else [Part(batch)]

    def splits(self, batch: Any) -> bool:
        """Return True if a batch is computed in several parts."""
        return bool(self._split(batch)[1])

    def _split(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return the parts of a batch and their numbers of samples, or empty lists if the batch is computed whole."""
        if self.size is not None and (samples := batch_size_of(batch)) > self.size:
            sizes = part_sizes(samples, self.size)
            batches = split(batch, sizes)
            if batches is not None:
                return batches, sizes
        return [], []

    def add_gradients(
        self, parts: Sequence[Part], add: Callable[[Part], Tensor], moved: Sequence[bool] | None = None
    ) -> Tensor:
        """Add the gradients of a batch, part by part.

        Args:
            parts: the parts of the batch.
            add: adds the gradients of one part, and returns its loss times its share, detached.
            moved: True for each module with buffers that the whole batch has updated already. None means no module.

        Returns:
            The loss of the batch.
        """
        if len(parts) == 1:
            return add(parts[0])
        samples = sum(part.samples for part in parts)
        buffers = Buffers(self.slots, moved)
        losses = []
        try:
            for part in parts:
                buffers.put_back()
                losses.append(add(part))
                buffers.add(part.samples / samples)
        except BaseException:
            buffers.put_back()
            raise
        buffers.conclude()
        return torch.stack(losses).sum()

    def _shares(self, batches: Sequence[Any], sizes: Sequence[int]) -> list[float | Tensor]:
        """Return the factor of each part's loss, so that the losses add up to the loss of the batch."""
        if self.sums_losses:
            return [1.0] * len(batches)
        weights: list[Any] = list(sizes)
        if self._spec.loss_weight is not None:
            found = [w.double() if isinstance(w, Tensor) else w for w in map(self.weight_of, batches)]
            total = sum(found)
            # If a batch has weight 0, each part has weight 0, too. Then the losses of parts are weighted by samples.
            if isinstance(total, Tensor):
                weights = [torch.where(total == 0, n, w) for n, w in zip(sizes, found, strict=True)]
            elif total:
                weights = found
        total = sum(weights)
        return [weight / total for weight in weights]

    def weight_of(self, batch: Any) -> float | Tensor:
        """Return the weight of the loss of a batch, by ``Spec.loss_weight``, which must be given."""
        assert self._spec.loss_weight is not None
        return self._spec.loss_weight(self._objective.lent(batch))


def _is_mean_over_samples(loss_fn: Any) -> bool:
    """Return True if a loss module is known to be a mean over samples or a sum.

    A mean that ignores some targets is not a mean over samples.
    """
    leaves_out = isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss))
    return isinstance(loss_fn, nn.modules.loss._Loss) and (loss_fn.reduction == "sum" or not leaves_out)


class Buffers:
    """Buffers that change once per batch, although each part of the batch updates them.

    Args:
        slots: the buffers of each module, by name.
        moved: True for each module whose buffers the whole batch has updated already. None means no module.
    """

    def __init__(self, slots: Sequence[dict[str, Tensor | None]], moved: Sequence[bool] | None) -> None:
        self._kept: list[tuple[dict[str, Tensor | None], str, SavedTensor, Tensor]] = []
        self._means: dict[int, Tensor] = {}
        self._moved = set()
        for i, own in enumerate(slots):
            for name, buffer in own.items():
                if buffer is None:
                    continue
                position, saved = len(self._kept), SavedTensor(buffer)
                bits = saved.bits
                assert bits is not None
                self._kept.append((own, name, saved, bits))
                if moved is not None and moved[i]:
                    self._moved.add(position)
                elif bits.is_floating_point() or bits.is_complex():
                    self._means[position] = torch.zeros_like(bits)

    def put_back(self) -> None:
        """Restore the buffers as they were before the batch."""
        for position in range(len(self._kept)):
            self._write_back(position)

    def add(self, share: float) -> None:
        """Add the update by one part, weighted with its ``share`` of the samples."""
        with torch.no_grad():
            for position in list(self._means):
                now, bits = self._now(position), self._kept[position][-1]
                if now is None or now.shape != bits.shape or now.dtype != bits.dtype:
                    del self._means[position]
                else:
                    self._means[position].add_(now - bits, alpha=share)

    def conclude(self) -> None:
        """Write the result of one update.

        Buffers that cannot be averaged, such as counts, keep the value of the last part.
        """
        with torch.no_grad():
            for position, mean in self._means.items():
                slots, name, saved, bits = self._kept[position]
                now = self._now(position)
                if now is None:
                    continue
                total = bits + mean
                total = torch.where(total.isnan(), now, total)  # infinities, as in masks, have no difference
                if slots[name] is saved.tensor:
                    now.copy_(total)
                else:  # other code may use the new object, so it must not change
                    slots[name] = total
        for position in self._moved:
            self._write_back(position)

    def _now(self, position: int) -> Tensor | None:
        slots, name, _, _ = self._kept[position]
        buffer = slots.get(name)
        return None if buffer is None else owned(buffer)

    def _write_back(self, position: int) -> None:
        slots, name, saved, _ = self._kept[position]
        if slots.get(name) is not saved.tensor:
            slots[name] = saved.tensor
            return
        saved.restore()


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the mapping from names to buffers that a module uses.

    For a ScriptModule, return a copy, because its buffers are never replaced.
    """
    return dict(module._buffers.items()) if isinstance(module, torch.jit.ScriptModule) else module._buffers

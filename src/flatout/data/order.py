"""The order and the random numbers of a plain ``DataLoader(num_workers=0)``, without its lists of indices.

torch draws random numbers at certain moments, and a loader that is to leave every generator in the same state has to
draw at the same ones (torch/utils/data/dataloader.py, sampler.py):

1. ``iter(loader)``: ``iter(batch_sampler)``, then one int64, the base seed, from ``loader.generator`` (default
   generator if ``None``);
2. whenever a batch needs an index that has not been drawn, its sampler draws the next block of them: a permutation,
   32 numbers with replacement, everything at once. A full batch needs no more than its own indices; a partial one has
   asked the sampler for more, and a ``RandomSampler`` then draws a last block, even one that it throws away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


@dataclass(frozen=True)
class Span:
    """One batch: samples ``indices`` (int64 ``[count]``), or ``first, first + 1, ...`` where they are ``None``."""

    indices: Tensor | None
    first: int
    count: int


@dataclass(frozen=True)
class Foreign:
    """One batch of which only the dataset knows what its indices mean: no ints, or out of range."""

    indices: Any


class Order(Protocol):
    """One epoch's batches, in order."""

    def next_batch(self, *, asked: bool) -> Span | Foreign | None:
        """The next batch; with ``asked``, ``None`` behind the last one.

        Unless ``asked``, when the user wants this very batch, nothing is drawn that somebody else could see: then
        ``None`` may also mean that the batch has to be asked for.
        """


def why_not_ordered(loader: DataLoader) -> str | None:
    """Why :func:`order_of` cannot stand in for the samplers of ``loader``; ``None`` if it can."""
    if loader.batch_sampler is None:
        return "batch_size=None: samples are not batched"
    if loader.num_workers > 0 and loader.worker_init_fn is not None:
        return "worker_init_fn runs in worker processes only"
    return None


def order_of(loader: DataLoader) -> Order:
    """An epoch of ``loader``; making it is what ``iter(loader)`` is to the generators."""
    batch_sampler: Any = loader.batch_sampler
    samples = len(loader.dataset)  # type: ignore[arg-type]
    order: Order
    blocks = _blocks_of(batch_sampler.sampler, samples) if type(batch_sampler) is BatchSampler else None
    order = _Asked(iter(batch_sampler), samples) if blocks is None else _Replayed(batch_sampler, blocks)
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return order


def _blocks_of(sampler: Any, samples: int) -> Iterator[Tensor] | None:
    """The indices of an epoch, block by block, each drawn as it is asked for.

    ``None`` unless the sampler is torch's own, draws on the host, and draws nothing that the dataset does not have.
    """
    generator = getattr(sampler, "generator", None)
    if generator is not None and generator.device.type != "cpu":
        return None
    if type(sampler) is SubsetRandomSampler:
        indices = as_indices(sampler.indices, samples)
        return None if indices is None else _permuted(indices, generator)
    if type(sampler) is SequentialSampler and len(sampler.data_source) <= samples:
        return iter([torch.arange(len(sampler))])
    if type(sampler) is RandomSampler and len(sampler.data_source) <= samples:
        return _random_blocks(sampler)
    if type(sampler) is WeightedRandomSampler and len(sampler.weights) <= samples:
        return _weighted(sampler)
    if type(sampler) is DistributedSampler and len(sampler.dataset) <= samples:  # type: ignore[arg-type]
        return _share(sampler)
    return None


def as_indices(indices: Sequence[int], samples: int) -> Tensor | None:
    """int64 ``[n]``, counted from the front; ``None`` where something is no int, or not in the dataset."""
    if not isinstance(indices, (Tensor, np.ndarray, range)) and not all(map(_is_int, indices)):
        return None
    found = torch.as_tensor(indices) if len(indices) else torch.empty(0, dtype=torch.int64)
    if found.dim() != 1 or found.dtype in (torch.bool, torch.uint64) or found.dtype.is_floating_point:
        return None
    found = found.to(torch.int64)
    if found.numel() and not (-samples <= int(found.min()) and int(found.max()) < samples):
        return None
    return torch.where(found < 0, found + samples, found)


def _is_int(index: Any) -> bool:
    return type(index) is int or isinstance(index, np.integer)


class _Replayed:
    """Draws as torch's samplers do, whole blocks of indices at a time."""

    def __init__(self, batch_sampler: BatchSampler, blocks: Iterator[Tensor]) -> None:
        sampler: Any = batch_sampler.sampler
        self._size = batch_sampler.batch_size
        self._drop_last = batch_sampler.drop_last
        self._sequential = type(sampler) is SequentialSampler
        self._blocks = blocks
        # A user sees what is drawn from a generator of his own; the one that a sampler makes dies with the epoch.
        self._is_seen = type(sampler) is RandomSampler and sampler.generator is not None
        self._taken = 0
        self._drawn = 0
        self._left = torch.empty(0, dtype=torch.int64)  # drawn, not taken

    def next_batch(self, *, asked: bool) -> Span | None:
        end = self._taken + self._size
        if self._drawn < end and (asked or (self._drawn and not self._is_seen)):
            self._draw(end)
        count = min(self._size, self._drawn - self._taken)
        if count < self._size and (not asked or self._drop_last or count == 0):
            return None
        indices = None if self._sequential else self._left[:count]
        span = Span(indices, self._taken, count)
        self._left = self._left[count:]
        self._taken += count
        return span

    def _draw(self, end: int) -> None:
        parts = [self._left]
        while self._drawn < end and (block := next(self._blocks, None)) is not None:
            parts.append(block)
            self._drawn += len(block)
        if len(parts) > 1:
            self._left = torch.cat(parts)


def _permuted(indices: Tensor, generator: torch.Generator | None) -> Iterator[Tensor]:
    yield indices[torch.randperm(len(indices), generator=generator)]


def _weighted(sampler: WeightedRandomSampler) -> Iterator[Tensor]:
    yield torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator)


def _random_blocks(sampler: RandomSampler) -> Iterator[Tensor]:
    n, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
    size = 32 if sampler.replacement else n
    whole, rest = divmod(sampler.num_samples, size)
    for block in range(whole + 1):  # the last one is drawn even if nothing of it is used
        count = size if block < whole else rest
        if sampler.replacement:
            yield torch.randint(n, (count,), dtype=torch.int64, generator=generator)
        else:
            yield torch.randperm(n, generator=generator)[:count]


def _share(sampler: DistributedSampler) -> Iterator[Tensor]:
    """The indices of one rank: shuffled alike on all, cut or repeated to a multiple of their number."""
    n = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.shuffle:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(sampler.seed + sampler.epoch))
    else:
        order = torch.arange(n)
    padded = order.repeat(-(-sampler.total_size // n))
    yield padded[sampler.rank : sampler.total_size : sampler.num_replicas]


class _Asked:
    """Batches of any other sampler: asked when the user asks, never ahead."""

    def __init__(self, batches: Iterator[Any], samples: int) -> None:
        self._batches = batches
        self._samples = samples

    def next_batch(self, *, asked: bool) -> Span | Foreign | None:
        if not asked:
            return None
        try:
            batch = next(self._batches)
        except StopIteration:
            return None
        found = as_indices(batch, self._samples) if type(batch) in (list, tuple) and batch else None
        return Foreign(batch) if found is None else Span(found, 0, len(found))

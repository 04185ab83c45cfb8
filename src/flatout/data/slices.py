"""Slices of batches: each rank trains on its part of every batch of the user's loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import MapDataPipe

from flatout.core.batches import batch_size_of, split
from flatout.data.forwarding import Forwarding
from flatout.data.loader_class import is_plain
from flatout.data.loaders import SEEDED_FROM, SLICED_FROM, clone_loader, unsliced
from flatout.data.order import BatchShare, IndexSpan, OpaqueBatch, Order, Position
from flatout.data.sharding import shards_of, why_not_split
from flatout.distributed.agreement import Agreement


def slice_of(samples: int, rank: int, ranks: int) -> tuple[slice, BatchShare]:
    """Return the samples of one rank in a batch, and the share of this rank.

    The slices of all ranks are contiguous and in order. Their sizes differ by at most one, and the first ranks have the
    larger slices. A rank without a sample gets the first sample as a stand-in, because each rank must take part in the
    step.

    Args:
        samples: number of samples in the batch.
        rank: number of the rank, from 0.
        ranks: number of ranks.
    """
    size, larger = divmod(samples, ranks)
    begin = rank * size + min(rank, larger)
    own = size + (rank < larger)
    return slice(begin, begin + own) if own else slice(0, 1), BatchShare(own, samples)


def sliced(loader: Any, ranks: Agreement) -> Any:
    """Return a loader whose batches are this rank's slices of the batches of ``loader``.

    If a ``Prefetcher`` or an ``InMemoryLoader`` iterates the loaders, all ranks have the order of rank 0. Rank 0 draws
    as one process would. The beginning of each epoch is then a collective, on the thread that calls ``iter``. Positions
    count whole batches, so that another number of ranks can resume. Worker processes of different ranks have different
    seeds.

    A plain ``DataLoader`` over a map-style dataset loads this rank's samples only. With a list of batches, or any other
    loader, every rank loads the whole batch, with the random numbers of rank 0, and keeps its slice.

    Args:
        loader: the same loader on all ranks, which yields the samples of all.
        ranks: all ranks. For a single one, ``loader`` itself is returned.

    Raises:
        ValueError: the loader cannot be sliced. The message says why (see :func:`why_not_sliced`).
    """
    if ranks.size == 1 or hasattr(loader, SLICED_FROM):
        return loader
    if reason := why_not_sliced(loader):
        raise ValueError(reason)
    if not is_plain(loader) or loader.batch_sampler is None or isinstance(loader.dataset, MapDataPipe):
        return SlicedLoader(loader, ranks)
    # With in_order=False, ranks could take slices of different batches in the same step.
    made = clone_loader(loader, batch_sampler=SlicedBatches(loader.batch_sampler, ranks), in_order=True)
    vars(made)[SLICED_FROM] = loader
    if hasattr(loader, SEEDED_FROM):
        vars(made)[SEEDED_FROM] = sliced(getattr(loader, SEEDED_FROM), ranks)
    return made


def why_not_sliced(loader: Any) -> str:
    """Return the reason why a loader cannot be sliced; empty if it can.

    Loaders that split their samples over the ranks (:func:`flatout.data.sharding.shards_of`) are not sliced. Their
    batch size is that of one rank. An iterable dataset must split its samples.
    """
    shards = shards_of(loader)
    return f"the loader splits its samples over {shards} ranks itself" if shards > 1 else why_not_split(loader)


def slices_of(loader: Any) -> SlicedBatches | None:
    """Return the batch sampler of a sliced loader of samples; None for another loader."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler if type(batch_sampler) is SlicedBatches else None


class SlicedBatches:
    """Batch sampler that yields this rank's slices of the batches of another sampler.

    A plain iteration draws the order from the generators of this process. :class:`SlicedOrder` has the order of rank 0.

    Args:
        sampler: the batch sampler of the user.
        ranks: all ranks.
    """

    def __init__(self, sampler: Any, ranks: Agreement) -> None:
        self.sampler = sampler
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        for batch in self.sampler:
            yield self.own_part(batch)[0]

    def __len__(self) -> int:
        return len(self.sampler)

    def own_part(self, batch: Any) -> tuple[Any, BatchShare]:
        """Return this rank's slice of a batch of indices, and its share."""
        indices = batch if hasattr(batch, "__len__") else list(batch)
        part, share = slice_of(len(indices), self.ranks.rank, self.ranks.size)
        return indices[part], share

    def slice_too(self, loader: Any) -> Any:
        """Return another loader, sliced for the same ranks."""
        return sliced(loader, self.ranks)


class SlicedOrder:
    """Order of this rank's slices. Positions are those of whole batches.

    Args:
        whole: the order of whole batches.
        batches: the batch sampler of the slices.
    """

    def __init__(self, whole: Order, batches: SlicedBatches) -> None:
        self._whole = whole
        self._batches = batches
        self._drawn: deque[IndexSpan | OpaqueBatch | None] = deque()
        self._has_drawn = False

    def draw(self) -> None:
        """Draw the first batches, unless they are drawn."""
        if not self._has_drawn:
            self._drawn.append(self.next_span(asked=True))

    def next_span(self, *, asked: bool) -> IndexSpan | OpaqueBatch | None:
        if self._drawn:
            return self._drawn.popleft()
        self._has_drawn = True
        span = self._whole.next_span(asked=asked)
        if span is None:
            return None
        if isinstance(span, OpaqueBatch):
            indices, share = self._batches.own_part(span.indices)
            return OpaqueBatch(indices, span.end, share)
        part, share = slice_of(span.count, self._batches.ranks.rank, self._batches.ranks.size)
        places = torch.arange(span.batches)[:, None] * span.count + torch.arange(part.start, part.stop)
        chosen = places.flatten() + span.first if span.indices is None else span.indices[places.flatten()]
        return IndexSpan(chosen, 0, part.stop - part.start, span.batches, span.end, share)

    def position(self) -> Position:
        return self._whole.position()

    def has_drawn_since(self, position: Position) -> bool:
        return self._whole.has_drawn_since(position)

    def completed(self, position: Position) -> Position:
        return self._whole.completed(position)


class SlicedLoader(Forwarding):
    """Loader of this rank's slices of whole batches, which every rank loads.

    Args:
        sliced_from: yields batches that can be split along their samples (:func:`flatout.data.split`).
        ranks: all ranks.
    """

    _OWN = frozenset({SLICED_FROM, "ranks"})

    def __init__(self, sliced_from: Any, ranks: Agreement) -> None:
        self.sliced_from = sliced_from
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        for batch in self.sliced_from:
            yield self.own_part(batch)[0]

    def __len__(self) -> int:
        return len(self.sliced_from)

    def own_part(self, batch: Any) -> tuple[Any, BatchShare]:
        """Return this rank's slice of a batch, and its share.

        Raises:
            ValueError: the batch cannot be split.
        """
        samples = batch_size_of(batch)
        part, share = slice_of(samples, self.ranks.rank, self.ranks.size)
        parts = split(batch, [part.start, part.stop - part.start, samples - part.stop])
        if parts is None:
            raise ValueError(
                f"loader must yield batches that can be split along their samples, got a {type(batch).__name__}. "
                "Pass a DataLoader with a batch_size, whose indices are split instead of its batches:\n"
                "    loader = DataLoader(dataset, batch_size=..., collate_fn=...)"
            )
        return parts[1], share

    @property
    def loader(self) -> Any:
        """Loader of whole batches."""
        return self.sliced_from

    @property
    def _wrapped(self) -> Any:
        return unsliced(self)

"""Loaders on several ranks: slices of the user's batches, and loaders that split their samples themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, MapDataPipe

from flatout.core.batches import batch_size_of, split
from flatout.core.kinds import check_number
from flatout.data.forwarding import Forwarding
from flatout.data.loader_class import base_of, is_plain
from flatout.data.loaders import SLICED_FROM, parts_of, set_epoch, unsliced
from flatout.data.order import BatchShare, SlicedBatches, slice_of
from flatout.distributed.agreement import Agreement


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
    return SlicedBatches.of(loader, ranks)


def why_not_sliced(loader: Any) -> str:
    """Return the reason why a loader cannot be sliced; empty if it can.

    Loaders that split their samples over the ranks (:func:`flatout.data.slices.shards_of`) are not sliced. Their
    batch size is that of one rank. An iterable dataset must split its samples.
    """
    shards = shards_of(loader)
    return f"the loader splits its samples over {shards} ranks itself" if shards > 1 else why_not_split(loader)


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


_COUNTS = "num_replicas", "num_processes", "world_size"
"""Names of attributes with the number of ranks.

torch uses the first, accelerate and transformers the second, and Hugging Face's datasets the third.
"""


def shards_of(loader: Any) -> int:
    """Return the number of ranks over which a loader splits its samples by itself; 1 if the number is unknown.

    The number is the attribute ``num_replicas`` (torch) or ``num_processes`` (accelerate, transformers) of the loader,
    of its sampler or batch sampler, or of its iterable dataset. The ``world_size`` of Hugging Face's
    ``split_dataset_by_node`` counts, too.
    """
    base = base_of(loader)
    parts = [loader, *parts_of(loader if base is None else base)]
    dataset = getattr(loader if base is None else base, "dataset", None)
    if isinstance(dataset, IterableDataset):
        parts += [dataset, getattr(dataset, "_distributed", None)]
    counts = (getattr(part, name, None) for part in parts for name in _COUNTS)
    return max((count for count in counts if type(count) is int), default=1)


def why_not_split(loader: Any) -> str:
    """Return why the loader's iterable dataset cannot train on several ranks; empty if it can, or is map-style."""
    base = base_of(loader)
    dataset = getattr(loader if base is None else base, "dataset", None)
    if not isinstance(dataset, IterableDataset) or shards_of(loader) > 1:
        return ""
    return (
        "an iterable dataset must yield other samples on each rank, got a "
        f"{type(dataset).__name__} that does not say so. Split it:\n"
        "    dataset = split_dataset_by_node(dataset, dist.get_rank(), dist.get_world_size())  # Hugging Face\n"
        "or, if it yields only the samples of its rank already, say so:\n"
        "    dataset.rank, dataset.num_replicas = dist.get_rank(), dist.get_world_size()"
    )


class SamplerEpoch:
    """Number of the epoch of a loader that is sharded by a sampler, or dataset, with ``set_epoch`` and ``epoch``.

    Each epoch has the next number. A number that the user sets takes precedence. For any other loader, and on a single
    rank, nothing happens.

    Args:
        loader: the user's loader.
        ranks: all ranks.
    """

    def __init__(self, loader: Any, ranks: Agreement) -> None:
        self._loader = loader
        parts = _with_epochs(loader) if ranks.size > 1 and shards_of(loader) > 1 else iter(())
        self._part = next(parts, None)
        self._begun: int | None = None
        self._has_ended = False

    def begin(self) -> None:
        """Begin an epoch."""
        if self._part is None:
            return
        if self._part.epoch == self._begun:
            set_epoch(self._loader, self._part.epoch + 1)
        self._begun, self._has_ended = self._part.epoch, False

    def end(self) -> None:
        """End the epoch, all of whose batches were yielded."""
        self._has_ended = True

    @property
    def to_resume(self) -> int | None:
        """Number of the epoch that a training resumes with; None if the loader has no numbers."""
        if self._part is None:
            return None
        return self._part.epoch + (self._has_ended and self._part.epoch == self._begun)

    def resume(self, epoch: Any) -> None:
        """Set the number of the next epoch.

        Raises:
            ValueError: ``epoch`` is no number.
        """
        if self._part is not None:
            set_epoch(self._loader, check_number(epoch, "sampler_epoch"))
            self._begun = None


def _with_epochs(loader: Any) -> Iterator[Any]:
    base = base_of(loader)
    base = loader if base is None else base
    for part in (*parts_of(base), getattr(base, "dataset", None)):
        if callable(getattr(part, "set_epoch", None)) and type(getattr(part, "epoch", None)) is int:
            yield part

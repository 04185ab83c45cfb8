"""Loaders that split their samples over the ranks by themselves: number of ranks, and number of the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from flatout.core.kinds import check_number
from flatout.data.loader_class import base_of
from flatout.data.loaders import parts_of, set_epoch
from flatout.distributed.agreement import Agreement

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

"""Base class of sources over torch's ``DataLoader``, and the source for iterable datasets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.data.loaders import clone_loader
from flatout.data.remote import InWorker
from flatout.data.source import Epoch, Source, check_keys


class DataLoaderSource(Source):
    """Twin of the user's ``DataLoader``. The twin keeps workers' exceptions whole and can begin in mid-epoch."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader, "")
        self._dataloader = loader
        self._persistent: DataLoader | None = None
        # torch's pin thread copies each batch of a worker. Without workers, the collate function may pin a batch and
        # fill the same memory again.
        self.is_fresh = loader.pin_memory and loader.num_workers > 0

    def _iterate(self) -> tuple[DataLoader, Any]:
        """Return a twin of the loader and an iterator over the twin. A twin with persistent workers is reused."""
        twin = self._make_twin() if self._persistent is None else self._persistent  # `or` would call the twin's len()
        self._persistent = twin if twin.persistent_workers else None
        # Lets the twin warn, as torch does, when it yields more batches than `len(loader)`.
        twin._IterableDataset_len_called = self._dataloader._IterableDataset_len_called
        return twin, iter(twin)

    def _make_twin(self, worker_seed: int | None = None, **changes: Any) -> DataLoader:
        loader = self._dataloader
        if loader.num_workers:
            changes["worker_init_fn"] = InWorker(loader.worker_init_fn)
        if worker_seed is not None:
            # The start of an epoch draws a seed for the workers, which the user's generator has already given.
            changes["generator"] = torch.Generator().manual_seed(worker_seed)
        return clone_loader(loader, **changes)

    def forget_workers(self) -> None:
        """Discard the persistent workers, which have ended."""
        self._persistent = None


class IterableSource(DataLoaderSource):
    """Batches of a ``DataLoader`` over an iterable dataset, which holds the position."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self._stateful: Any = loader.dataset
        self.is_under_way = False
        """True if an epoch has begun and not ended."""
        self.was_last = False
        """True if the last yielded batch was the last one of the epoch."""
        self.goes_on = False
        """True from ``load_state_dict`` until the resumed epoch yields a batch."""

    def open(self, pinned_for: int | None = None) -> Epoch:
        _, batches = self._iterate()
        if self.goes_on and self.was_last:
            batches = iter(())
        self.is_under_way, self.was_last = True, self.goes_on and self.was_last
        return IterableEpoch(batches, self)

    def _make_twin(self, worker_seed: int | None = None, **changes: Any) -> DataLoader:
        return super()._make_twin(0 if self.goes_on else None, **changes)

    def mark(self) -> Any:
        if self._why_not():
            return None
        return copy.deepcopy(self._stateful.state_dict()), self.is_under_way, self.was_last

    def state_dict(self, mark: Any) -> dict[str, Any]:
        if reason := self._why_not():
            raise TypeError(f"a DataLoader over a {type(self._stateful).__name__} cannot go on in mid-epoch: {reason}")
        return dict(zip(("dataset", "is_under_way", "was_last"), mark, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict((None, None, None))
        check_keys(state, "dataset", "is_under_way", "was_last")
        self._stateful.load_state_dict(state["dataset"])
        self.is_under_way = self.goes_on = state["is_under_way"]
        self.was_last = state["was_last"]

    def _why_not(self) -> str:
        if not hasattr(self._stateful, "state_dict") or not hasattr(self._stateful, "load_state_dict"):
            return "its iterable dataset lacks state_dict() or load_state_dict()"
        if self._dataloader.num_workers:
            return "its state is in worker processes (num_workers=0, or torchdata's StatefulDataLoader, would do)"
        return ""


class IterableEpoch(Epoch):
    """One pass over an iterable dataset."""

    def __init__(self, batches: Iterator[Any], source: IterableSource) -> None:
        super().__init__(batches)
        self._source = source

    def _passed(self) -> None:
        # After a batch that is smaller than the others, `ended` of the fetcher is True.
        fetcher = getattr(self._batches, "_dataset_fetcher", None)
        self._source.was_last, self._source.goes_on = getattr(fetcher, "ended", False), False

    def _ended(self) -> None:
        self._source.is_under_way = self._source.goes_on = False

    def _died(self) -> None:
        self._source.forget_workers()

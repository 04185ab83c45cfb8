"""Source over a ``DataLoader`` with a map-style dataset, resumed by the order of its samples."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from flatout.data.dataloader_source import DataLoaderSource
from flatout.data.loaders import seeds_workers_once, unsliced
from flatout.data.order import IndexSpan, OpaqueBatch, Order, index_lists
from flatout.data.position import Progress
from flatout.data.seeding import mixed
from flatout.data.source import Epoch


class MapStyleSource(DataLoaderSource):
    """Batches of a ``DataLoader`` over a map-style dataset. The drawn indices give the position."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__(loader)
        self.progress = Progress(loader)
        self.worker_seed = 0

    def open(self, pinned_for: int | None = None) -> Epoch:
        if self.progress.goes_on:
            self._persistent = None  # the twin of an epoch that began but yielded no batch
        if self._persistent is not None and not seeds_workers_once(self._dataloader):
            _sampler_of(self._persistent).draws_seed = True
        with self.progress.opening():
            twin, batches = self._iterate()
        self.progress.has_run = True
        _sampler_of(twin).has_order = False
        return MapStyleEpoch(batches, self, _sampler_of(twin))

    def _make_twin(self, worker_seed: int | None = None, **changes: Any) -> DataLoader:
        sampler = RecordingSampler(self._dataloader, self.progress)
        if self.progress.goes_on or self._had_workers:
            # The same worker seeds would repeat the augmentation of the epoch's first batches.
            position = self.progress.position or {"taken": 0}
            worker_seed = position.get("worker_seed", self.worker_seed) + position["taken"]
            sampler.begin()  # before the workers start, because a sampler that draws other batches is an error
            sampler.has_order = True
        role = "sampler" if self._dataloader.batch_sampler is None else "batch_sampler"
        twin = super()._make_twin(worker_seed, **{role: sampler})
        if self.progress.rank and twin.num_workers:
            sampler.seed_apart(twin)
        return twin

    @property
    def _had_workers(self) -> bool:
        """True if an earlier epoch drew the single seed of persistent workers, of this loader or of its original."""
        return self.progress.has_run and seeds_workers_once(self._dataloader)

    def mark(self) -> Any:
        position = self.progress.position
        return None if position is None else position | {"worker_seed": self.worker_seed} | self._dataset_state()

    def state_dict(self, mark: Any) -> dict[str, Any]:
        if self._dataloader.num_workers and not self._dataloader.in_order:
            raise TypeError("a DataLoader with in_order=False cannot go on in mid-epoch: any batch may be missing")
        position = None if mark is None else {name: value for name, value in mark.items() if name != "dataset"}
        dataset = self._dataset_state() if mark is None else {n: value for n, value in mark.items() if n == "dataset"}
        return dataset | self.progress.state_dict(position) | {"worker_seed": self.worker_seed}

    def _dataset_state(self) -> dict[str, Any]:
        """Return the dataset's state if it has one. States of its copies in worker processes are unknown."""
        dataset: Any = self._dataloader.dataset
        if self._dataloader.num_workers or not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
            return {}
        return {"dataset": copy.deepcopy(dataset.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress.load_state_dict(state)
        dataset: Any = self._dataloader.dataset
        if "dataset" in state and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self.worker_seed = state.get("worker_seed", 0)
        self._persistent = None


class MapStyleEpoch(Epoch):
    """One pass over a map-style dataset."""

    def __init__(self, batches: Any, source: MapStyleSource, sampler: RecordingSampler) -> None:
        super().__init__(batches)
        assert sampler.order is not None
        self._source, self._progress = source, source.progress
        self._order, self._given = sampler.order, sampler.given
        self._counted = 0
        source.worker_seed = batches._base_seed if sampler.shared_seed is None else sampler.shared_seed

    def _passed(self) -> None:
        # Number of batches that workers have sent, exceptions included. Without workers, each drawn batch has passed.
        arrived = getattr(self._batches, "_rcvd_idx", self._counted + len(self._given))
        while self._counted < arrived and self._given:  # a sampler that raised has drawn no batch
            self._counted += 1
            span, number = self._given.popleft()
            self.share = span.share
            self._progress.reached(self._order, span, number)

    def _ended(self) -> None:
        self._progress.ended(self._order)

    def _died(self) -> None:
        self._source.forget_workers()


class RecordingSampler:
    """Sampler of a twin. Draws the user's batches in the user's order and records the position after each."""

    def __init__(self, loader: DataLoader, progress: Progress) -> None:
        self._loader = loader
        self._progress = progress
        self.order: Order | None = None
        self.given: deque[tuple[IndexSpan | OpaqueBatch, int]] = deque()
        self.draws_seed = False
        """True to draw the seed of an epoch in place of torch, which draws none for workers that are alive."""
        self.has_order = False
        """True if the order of the next epoch has been drawn."""
        self.shared_seed: int | None = None
        """Seed of rank 0's workers, from which this rank derives its own; None if both are the same."""
        self._apart: tuple[Any, torch.Generator] | None = None

    def begin(self) -> None:
        """Draw the order of the next epoch."""
        self.order = self._progress.begin(None, reads_ahead=self._loader.num_workers > 0)
        self.given = deque()

    def seed_apart(self, twin: DataLoader) -> None:
        """Give the workers of a twin other seeds than those of rank 0."""
        self._apart = twin.generator, torch.Generator()
        twin.generator = self._apart[1]

    def __iter__(self) -> Iterator[Any]:
        # DataLoader iterates its sampler twice before its first workers load. `_make_twin` has drawn the order of a
        # resumed epoch and of an epoch after persistent workers.
        if not self.has_order:
            self.begin()
            if self.draws_seed:
                _drawn_seed(self._loader.generator)
        if self._apart is not None and self.shared_seed is None:
            self.shared_seed = _drawn_seed(self._apart[0])
            self._apart[1].manual_seed(mixed(self.shared_seed, self._progress.rank))
        assert self.order is not None
        return RecordedBatches(unsliced(self._loader), self.order, self.given)

    def __len__(self) -> int:
        return len(self._loader)


def _drawn_seed(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _sampler_of(twin: DataLoader) -> RecordingSampler:
    return twin.sampler if twin.batch_sampler is None else twin.batch_sampler  # type: ignore[return-value]


class RecordedBatches:
    """Batches of a sampler's order. Not a generator, because a generator ends when it raises."""

    def __init__(self, loader: DataLoader, order: Order, given: deque[tuple[IndexSpan | OpaqueBatch, int]]) -> None:
        sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
        self._names = sampler.indices if type(sampler) is SubsetRandomSampler else None
        self._is_batched = loader.batch_sampler is not None
        self._order = order
        self._given = given
        self._lists: Iterator[tuple[IndexSpan | OpaqueBatch, int, Any]] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found = next(self._lists, None)
        if found is None:
            span = self._order.next_span(asked=True)
            if span is None:
                raise StopIteration
            self._lists = index_lists(span)
            found = next(self._lists)
        span, number, indices = found
        self._given.append((span, number))
        if self._names is not None and isinstance(span, IndexSpan):
            indices = [self._names[place] for place in indices]
        return indices if self._is_batched else indices[0]

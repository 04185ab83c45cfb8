"""Sources for each kind of loader. ``source_of`` chooses the kind."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from flatout.core.kinds import check_number
from flatout.core.random_state import RandomState, generators_in
from flatout.data.dataloader_source import IterableSource
from flatout.data.draws import Draws, SharedDraws
from flatout.data.in_memory_loader import InMemoryLoader
from flatout.data.loader_class import is_plain
from flatout.data.map_style_source import MapStyleSource
from flatout.data.slices import SlicedLoader
from flatout.data.source import Epoch, Source, check_keys


def source_of(loader: Any) -> Source:
    """Return the source for a loader. A source is returned as given."""
    if isinstance(loader, Source):
        return loader
    if type(loader) is InMemoryLoader:
        return InMemorySource(loader)
    if type(loader) is SlicedLoader:
        return SlicedSource(loader)
    if is_plain(loader) and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        if not isinstance(loader.dataset, IterableDataset):
            return MapStyleSource(loader)
        return IterableSource(loader)
    if isinstance(loader, (list, tuple)):
        return ListSource(loader)
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulSource(loader)
    return Source(loader, "it has no state_dict() and load_state_dict()")


class InMemorySource(Source):
    """Batches of an ``InMemoryLoader``."""

    def __init__(self, loader: InMemoryLoader) -> None:
        super().__init__(loader, "")
        self._memory = loader
        self._progress = loader.progress
        self.is_fresh = True

    def open(self, pinned_for: int | None = None) -> Epoch:
        if pinned_for is None or self._memory.device is not None:
            return InMemoryEpoch(iter(self._memory))
        return InMemoryEpoch(self._memory.iterate_pinned(pinned_for))

    def mark(self) -> Any:
        return self._progress.position

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return self._progress.state_dict(mark)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._progress.load_state_dict(state)


class InMemoryEpoch(Epoch):
    """One pass over data in memory."""

    def _passed(self) -> None:
        self.share = getattr(self._batches, "share", None)


class SlicedSource(Source):
    """Slices of the batches of a loader that every rank iterates as a whole, with the random numbers of rank 0."""

    def __init__(self, loader: SlicedLoader) -> None:
        super().__init__(loader, "")
        self._slices = loader
        self._whole = source_of(loader.loader)
        self.is_fresh = self._whole.is_fresh

    def open(self, pinned_for: int | None = None) -> Epoch:
        draws = SharedDraws(self._slices.ranks, RandomState.only(generators_in(self._slices.loader)))
        with draws.drawing():
            whole = self._whole.open(pinned_for)
        return SlicedEpoch(whole, self._slices, draws)

    def mark(self) -> Any:
        return self._whole.mark()

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return self._whole.state_dict(mark)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._whole.load_state_dict(state)


class SlicedEpoch(Epoch):
    """One pass over slices of whole batches."""

    def __init__(self, whole: Epoch, slices: SlicedLoader, draws: Draws) -> None:
        super().__init__(whole)
        self._slices, self._draws = slices, draws

    def next(self, *, waits: bool = True) -> Any:
        with self._draws.drawing():
            batch = super().next(waits=waits)
        batch, self.share = self._slices.own_part(batch)
        return batch


class StatefulSource(Source):
    """Batches of a loader with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, "")
        self._stateful = loader

    def mark(self) -> Any:
        try:
            return copy.deepcopy(self._stateful.state_dict())
        except Exception as error:  # `state_dict` raises this error
            return error

    def state_dict(self, mark: Any) -> dict[str, Any]:
        if isinstance(mark, Exception):
            raise mark
        return mark

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stateful.load_state_dict(state)


class ListSource(Source):
    """Batches in a list."""

    def __init__(self, batches: list[Any] | tuple[Any, ...]) -> None:
        super().__init__(batches, "")
        self._list = batches
        self.first = 0
        """Position of the first batch of the next epoch."""
        self.passed = 0
        """Position after the last yielded batch."""
        self.loads = 0
        """Number of loaded states. An epoch from before the last load leaves the position unchanged."""

    def open(self, pinned_for: int | None = None) -> Epoch:
        return ListEpoch(itertools.islice(self._list, self.first, None), self)

    def mark(self) -> Any:
        return self.passed

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return {"batches": mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, "batches")
        self.passed = self.first = check_number(state["batches"], "batches")
        self.loads += 1


class ListEpoch(Epoch):
    """One pass over a list."""

    def __init__(self, batches: Iterator[Any], source: ListSource) -> None:
        super().__init__(batches)
        self._source, self._loads, self._count = source, source.loads, source.first

    def _passed(self) -> None:
        self._count += 1
        self._move_to(self._count)

    def _ended(self) -> None:
        self._move_to(0)

    def _move_to(self, position: int) -> None:
        if self._source.loads == self._loads:
            self._source.passed, self._source.first = position, 0

"""Replay of batches that trials took from a loader that cannot be rewound."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from flatout.core.batches import cloned
from flatout.core.random_state import RandomState
from flatout.data.forwarding import CopiedAsWrapped
from flatout.data.source import Epoch, Source, source_of


class ReplayBuffer(CopiedAsWrapped, Source):
    """Loader whose first epoch begins with batches that were already read. No batch is lost or repeated.

    Reading ahead leaves the random generators unchanged. When the first epoch begins, each generator that is still
    unchanged advances to its state after the reading. So training draws the same numbers as without reading ahead, and
    the second epoch has another order than the first. A generator that was seeded or used in between keeps its state.
    The first epoch begins at its first batch, not at ``iter``.

    A copy or pickle is one of ``loader``, without the batches that were read.

    Args:
        loader: the loader. Epochs after the first iterate it from the start.
        count: batches to read at most.
    """

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        super().__init__(loader)
        self._before = RandomState.capture(loader)
        with self._before.restored():
            self._source = source_of(loader)
            self._rest: Epoch | None = self._source.open()
            self._place = self._rest.place
            # Copies, because the loader may reuse the memory for the next batch.
            self._read = deque(
                (cloned(batch), self._rest.place, self._rest.share) for batch in itertools.islice(self._rest, count)
            )
            self._after: RandomState | None = self._before.reread()

    @property
    def read(self) -> list[Any]:
        """Batches that were read and not yet yielded."""
        return [batch for batch, _, _ in self._read]

    def __iter__(self) -> Iterator[Any]:
        return self.open()

    def open(self, pinned_for: int | None = None) -> Epoch:
        is_first = self._rest is not None or self._after is not None
        inner = None if is_first else self._source.open(pinned_for)
        return self._begin(Epoch(self, inner=inner, at=(pinned_for, self._place) if is_first else None))

    def _fetch(self, epoch: Epoch, waits: bool) -> Any:
        if epoch.inner is None:
            if self._after is not None:
                self._before.advance(self._after)
                self._after = None
            rest, self._rest = self._rest, None
            epoch.inner = self._source.open(epoch.at[0]) if rest is None else rest
            # The first iterator that is advanced yields the batches that were read.
            epoch.at = None if rest is None else epoch.at
        if epoch.at is not None and self._read:
            batch, place, epoch.share = self._read.popleft()
            epoch.at = (place,)
            return batch
        epoch.at = None
        batch = epoch.inner.next(waits=waits)
        epoch.share = epoch.inner.share
        return batch

    def _place_in(self, epoch: Epoch) -> Any:
        if epoch.at is not None:
            return epoch.at[-1]
        return epoch.inner and epoch.inner.place

    def state_at(self, place: Any) -> dict[str, Any]:
        if self._after is None:
            return self._source.state_at(place)
        # The generators were put back, so the state of the loader is that after the reading.
        with self._before.reread().restored():
            self._before.advance(self._after)
            state = self._source.state_at(place)
        return {"source": state, "generators": [self._before.states(), self._after.states()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before_first = state.keys() == {"source", "generators"}
        self._source.load_state_dict(state["source"] if before_first else state)
        self._resume(None)
        self._rest, self._after = None, None
        if before_first:
            self._before, self._after = map(self._before.given, state["generators"])
        self._read.clear()

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def _wrapped(self) -> Any:
        return self._loader

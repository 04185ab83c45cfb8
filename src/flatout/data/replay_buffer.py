"""Replay of batches that trials took from a loader that cannot be rewound."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from flatout.core.batches import cloned
from flatout.core.random_state import RandomState
from flatout.data.forwarding import CopiedAsWrapped
from flatout.data.order import BatchShare
from flatout.data.source import Epoch, Source
from flatout.data.source_kinds import source_of


class ReplayBuffer(CopiedAsWrapped, Source):
    """Loader whose first epoch begins with batches that were already read. No batch is lost or repeated.

    Reading ahead leaves the random generators unchanged. When the first epoch begins, each generator that is still
    unchanged advances to its state after the reading. So training draws the same numbers as without reading ahead, and
    the second epoch has another order than the first. A generator that was seeded or used in between keeps its state.

    A copy or pickle is one of ``loader``, without the batches that were read.

    Args:
        loader: the loader. Epochs after the first iterate it from the start.
        count: batches to read at most.
    """

    _OWN = frozenset({"is_fresh"})

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        super().__init__(loader, "")
        self._before = RandomState.capture(loader)
        with self._before.restored():
            self._read_ahead(loader, count)
            self._after: RandomState | None = self._before.reread()

    def _read_ahead(self, loader: Iterable[Any], count: int) -> None:
        self._source = source_of(loader)
        self._rest: Epoch | None = self._source.open()
        # The loader's position after the last batch that was yielded. The loader itself is ahead of this position while
        # batches that were read are left.
        self._behind: tuple[Any] | None = (self._source.mark(),)
        # Copies, because the loader may reuse the memory for the next batch.
        self._read = deque(
            (cloned(batch), self._source.mark(), self._rest.share) for batch in itertools.islice(self._rest, count)
        )

    @property
    def read(self) -> list[Any]:
        """Batches that were read and not yet yielded."""
        return [batch for batch, _, _ in self._read]

    def __iter__(self) -> Iterator[Any]:
        return self.open()

    def open(self, pinned_for: int | None = None) -> Epoch:
        if self._rest is None and self._after is None:
            return self._source.open(pinned_for)
        return _FirstEpoch(self, pinned_for)

    @property
    def is_whole(self) -> bool:
        """True until the first epoch begins."""
        return self._rest is not None

    def begin(self, pinned_for: int | None) -> Epoch:
        """Begin the first epoch, or another one in later calls.

        Returns:
            The batches of the epoch. Of the first epoch, those that were not read yet.
        """
        if self._after is not None:
            self._before.advance(self._after)
            self._after = None
        rest, self._rest = self._rest, None
        return self._source.open(pinned_for) if rest is None else rest

    def give_back(self) -> tuple[Any, BatchShare | None]:
        """Return the next batch that was read, and its share.

        Raises:
            StopIteration: none is left.
        """
        if not self._read:
            self._behind = None
            raise StopIteration
        batch, mark, share = self._read.popleft()
        self._behind = (mark,)
        return batch, share

    def mark(self) -> Any:
        return self._source.mark() if self._behind is None else self._behind[0]

    def state_dict(self, mark: Any) -> dict[str, Any]:
        state = self._source.state_dict(mark)
        if self._after is None:
            return state
        return {"source": state, "generators": [self._before.states(), self._after.states()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before_first = state.keys() == {"source", "generators"}
        self._source.load_state_dict(state["source"] if before_first else state)
        self._rest, self._behind, self._after = None, None, None
        if before_first:
            self._before, self._after = map(self._before.given, state["generators"])
        self._read.clear()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def _wrapped(self) -> Any:
        return self._loader


class _FirstEpoch(Epoch):
    """First epoch: the batches that were read, then the rest. Begins at the first ``next``, not at ``iter``."""

    def __init__(self, replayed: ReplayBuffer, pinned_for: int | None) -> None:
        super().__init__(iter(()))
        self._replayed = replayed
        self._pinned_for = pinned_for
        self._rest: Epoch | None = None
        self._is_first = False  # the first iterator that is advanced yields the batches that were read

    def next(self, *, waits: bool = True) -> Any:
        if self._batches is None:
            raise StopIteration
        if self._rest is None:
            self._is_first = self._replayed.is_whole
            self._rest = self._replayed.begin(self._pinned_for)
        if self._is_first:
            with contextlib.suppress(StopIteration):
                batch, self.share = self._replayed.give_back()
                return batch
        batch = self._rest.next(waits=waits)
        self.share = self._rest.share
        return batch

    def close(self) -> None:
        super().close()
        if self._rest is not None:
            self._rest.close()

"""Gives back the batches that trials took from a loader which cannot be rewound."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from flatout.data.batch import cloned
from flatout.data.forwarding import Forwarding
from flatout.data.source import Epoch, Source, source_of


class Replayed(Forwarding, Source):
    """A loader whose first epoch begins with batches that were read from it already. Nothing is lost or repeated.

    Args:
        loader: the loader; epochs after the first iterate it anew.
        count: batches to read, or all there are.
    """

    _OWN = frozenset({"is_fresh"})

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        super().__init__(loader, "")
        self._source = source_of(loader)
        self._rest: Epoch | None = self._source.open()
        # Where the loader was behind the batch that was handed out last: not where it is while there are batches left.
        self._behind: tuple[Any] | None = (self._source.mark(),)
        # Copies: the loader may fill its memory again with the next batch.
        self._read = deque((cloned(batch), self._source.mark()) for batch in itertools.islice(self._rest, count))

    @property
    def read(self) -> list[Any]:
        """Batches that were read and are not handed out yet."""
        return [batch for batch, _ in self._read]

    def __iter__(self) -> Iterator[Any]:
        return self.open()

    def open(self, pinned_for: int | None = None) -> Epoch:
        rest, self._rest = self._rest, None
        return self._source.open(pinned_for) if rest is None else Epoch(_First(self, rest))

    def give_back(self) -> Any:
        """The next of the batches that were read.

        Raises:
            StopIteration: there is none left.
        """
        if not self._read:
            self._behind = None
            raise StopIteration
        batch, mark = self._read.popleft()
        self._behind = (mark,)
        return batch

    def mark(self) -> Any:
        return self._source.mark() if self._behind is None else self._behind[0]

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return self._source.state_dict(mark)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)
        self._rest, self._behind = None, None
        self._read.clear()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def _wrapped(self) -> Any:
        return self._loader


class _First:
    """The first epoch: what was read, and the rest."""

    def __init__(self, replayed: Replayed, rest: Epoch) -> None:
        self._replayed = replayed
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._replayed.give_back()
        except StopIteration:
            return next(self._rest)

    def close(self) -> None:
        self._rest.close()

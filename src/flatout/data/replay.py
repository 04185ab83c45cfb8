"""Gives back the batches that trials took from a loader which cannot be rewound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class Replayed:
    """A loader whose first epoch begins with batches that were read from it already. Nothing is lost or repeated.

    Args:
        loader: the loader; epochs after the first iterate it anew.
        taken: batches that ``rest`` has yielded so far.
        rest: the open iterator that continues behind them.
    """

    def __init__(self, loader: Iterable[Any], taken: Sequence[Any], rest: Iterator[Any]) -> None:
        self._loader = loader
        self._first: tuple[list[Any], Iterator[Any]] | None = (list(taken), rest)

    def __iter__(self) -> Iterator[Any]:
        first, self._first = self._first, None
        if first is None:
            yield from self._loader
        else:
            taken, rest = first
            while taken:
                yield taken.pop(0)
            yield from rest

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy looks for these before there is a loader to ask
            raise AttributeError(name)
        return getattr(self._loader, name)

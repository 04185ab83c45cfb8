"""Source of batches and one pass over it: the interface of ``Prefetcher`` to every kind of loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flatout.data.order import BatchShare
from flatout.data.remote import NotReady, WorkerError, death_of_a_worker, next_of, watch


class Source:
    """Batches of a loader that cannot resume in mid-epoch. Subclasses can.

    Args:
        loader: yields the batches.
        reason: why the loader cannot resume.

    Attributes:
        is_fresh: the memory of a batch is never written again.
    """

    def __init__(self, loader: Iterable[Any], reason: str) -> None:
        self._loader = loader
        self._reason = reason
        self.is_fresh = False

    def open(self, pinned_for: int | None = None) -> Epoch:
        """Return a new epoch, or the rest of the epoch in which a loaded state was saved.

        Args:
            pinned_for: index of a CUDA device. Batches may be in pinned memory that torch does not know, so the caller
                copies them to that device by a :class:`NativeCopier`.
        """
        batches = iter(self._loader)
        return Epoch(batches, closes=batches is not self._loader)

    def mark(self) -> Any:
        """Return the position after the last yielded batch. The call is cheap enough for every batch."""
        return None

    def state_dict(self, mark: Any) -> dict[str, Any]:
        """Return the state from which an epoch resumes after ``mark``.

        Raises:
            TypeError: the loader cannot resume in mid-epoch; the message has the reason.
        """
        raise TypeError(f"a {type(self._loader).__name__} cannot go on in mid-epoch: {self._reason}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next epoch where ``state`` was saved.

        Raises:
            TypeError: the loader cannot resume in mid-epoch.
            ValueError: the state was saved by another kind of loader.
        """
        self.state_dict(None)


class Epoch:
    """One pass over a loader. After the death of a worker process, the next batch raises a :class:`WorkerError`.

    Args:
        batches: yields the batches.
        closes: True to close ``batches`` at the end. False for an iterator that is the loader itself.

    Attributes:
        share: share of this rank in the last batch; None if the loader is not sliced.
    """

    share: BatchShare | None = None

    def __init__(self, batches: Iterator[Any], *, closes: bool = True) -> None:
        self._batches: Iterator[Any] | None = batches
        self._closes = closes
        watch(batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, *, waits: bool = True) -> Any:
        """Return the next batch.

        Args:
            waits: False to raise ``NotReady`` if worker processes have not loaded the batch (:func:`next_of`).
        """
        batches = self._batches
        if batches is None:
            raise StopIteration
        try:
            batch = next_of(batches, waits=waits)
        except StopIteration:
            self._ended()
            self.close()
            raise
        except NotReady:
            raise
        except Exception as error:
            self._passed()
            if death := death_of_a_worker(batches, error):
                self._died()
                self.close()
                raise WorkerError(death) from error
            raise
        self._passed()
        return batch

    def close(self) -> None:
        """Drop the loader's iterator and its workers."""
        batches, self._batches = self._batches, None
        close = getattr(batches, "close", None)
        if self._closes and callable(close):
            close()

    def _passed(self) -> None:
        """Handle a yielded batch, or an exception in place of a batch."""

    def _ended(self) -> None:
        """Handle the end of the epoch."""

    def _died(self) -> None:
        """Handle the death of a worker."""


def check_keys(state: dict[str, Any], *names: str) -> None:
    """Raise a ValueError unless the state has exactly these keys."""
    if set(state) != set(names):
        raise ValueError(f"the state was saved by a loader of another kind: it holds {', '.join(state)}")

"""Search for the loader of a script's updates, and replacement of loaders by faster ones from their next epoch.

``DataLoader.__iter__`` is patched. The patch also covers subclasses that call the base method.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.core.held import held, hold, release
from flatout.core.replaced import replaced
from flatout.data import clone_loader
from flatout.data.workers_watch import is_off

_FASTER = "_flatout_faster"


class Drawn(NamedTuple):
    """Weak reference to the loader of an update, and the number of batches that the update took from this loader."""

    loader: weakref.ref[DataLoader[Any]]
    batches: int


class _Served(NamedTuple):
    """Faster loader, and the ``collate_fn`` of the script's loader that the faster loader was made for."""

    loader: Iterable[Any]
    collate_fn: Callable[..., Any]


class Loaders:
    """Patch of ``DataLoader`` that counts the batches of a script's loaders and replaces loaders, until ``close``."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loaders: weakref.WeakKeyDictionary[_BaseDataLoaderIter, weakref.ref[DataLoader[Any]]]
        self._loaders = weakref.WeakKeyDictionary()
        self._served: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._drawn: Counter[weakref.ref[DataLoader[Any]]] = Counter()
        self._counting, self._stack = ExitStack(), ExitStack()
        self._stack.enter_context(replaced(DataLoader, "__iter__", self._serving))

    def close(self) -> None:
        """Restore torch's functions. Loaders that have begun an epoch finish this epoch."""
        self._stack.close()
        self.stop_counting()
        for loader in self._served:
            release(loader, _FASTER)
        self._served.clear()

    def serve(self, loader: DataLoader[Any], faster: Iterable[Any]) -> None:
        """Replace a loader by ``faster`` from its next epoch on, until a change of the dataset turns ``faster`` off."""
        if faster is loader:
            release(loader, _FASTER)
            return
        if isinstance(faster, DataLoader) and faster.persistent_workers and not loader.persistent_workers:
            # Persistent workers have one iterator, and the script may iterate the loader twice at once.
            faster = clone_loader(faster, persistent_workers=False)
        hold(loader, _FASTER, _Served(faster, loader.collate_fn))
        self._served.add(loader)

    def _serving(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(iterate)
        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            if os.getpid() == self._process and (served := held(loader, _FASTER)) is not None:
                if served.collate_fn is loader.collate_fn and not is_off(served.loader):
                    return iter(served.loader)
                release(loader, _FASTER)
            batches = iterate(loader)
            if isinstance(batches, _BaseDataLoaderIter):
                self._loaders[batches] = reference = weakref.ref(loader)
                hash(reference)  # cached now, because a dead reference cannot compute its hash
            return batches

        return __iter__

    # The loader of the updates

    def start_counting(self) -> None:
        """Count the batches that this thread draws from each loader."""
        counted = partial(self._counted, threading.get_ident())
        self._counting.enter_context(replaced(_BaseDataLoaderIter, "__next__", counted))

    def _counted(self, thread: int, drawing: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(drawing)
        def __next__(batches: _BaseDataLoaderIter) -> Any:
            batch = drawing(batches)
            if threading.get_ident() == thread and (loader := self._loaders.get(batches)) is not None:
                self._drawn[loader] += 1
            return batch

        return __next__

    def stop_counting(self) -> None:
        """Stop counting, and discard the counts."""
        self._counting.close()
        self._drawn.clear()

    def drawn(self) -> Drawn | None:
        """Return the loader and the number of batches since the last call, or None without exactly one loader."""
        counted = list(self._drawn.items())
        self._drawn.clear()
        return Drawn(*counted[0]) if len(counted) == 1 else None

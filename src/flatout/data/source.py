"""Sources of batches: the interface of ``Prefetcher`` to every kind of loader, with the place to resume from."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from flatout.core.kinds import check_kinds, check_number
from flatout.core.random_state import RandomState, generators_in
from flatout.data.loader_class import is_plain
from flatout.data.loaders import TORCHS_SAMPLERS, clone_loader, seeds_workers_once, unsliced
from flatout.data.order import BatchShare, Order, SharedDraws, decisive, slices_of
from flatout.data.remote import InWorker, NotReady, WorkerError, death_of_a_worker, next_of, watch
from flatout.data.seeding import mixed
from flatout.data.slices import SlicedLoader

_VERSION = 2


class Source:
    """Batches of a loader, and the place after the last batch that was yielded.

    This class is for lists of batches, for loaders with ``state_dict`` and ``load_state_dict``, and for all others,
    which cannot resume in mid-epoch. Of epochs that overlap, the place is that of the newest epoch that has yielded a
    batch.

    Args:
        loader: yields the batches.
    """

    is_fresh = False
    """True if the memory of a batch is never written again."""
    _place: Any = None
    """Place after the last batch. None: no epoch has begun, or the source has its place between epochs."""
    _begun = 0
    _newest = 0  # number of the newest epoch that yielded a batch, or the first one after a load
    _loaded: Any = None
    """State to resume from, until an epoch that began after the load yields a batch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader: Any = loader
        self._is_list = isinstance(loader, (list, tuple))
        self._is_stateful = all(callable(getattr(loader, n, None)) for n in ("state_dict", "load_state_dict"))

    def open(self, pinned_for: int | None = None) -> Epoch:
        """Return a new epoch, or the rest of the epoch in which a loaded state was saved.

        Args:
            pinned_for: index of a CUDA device. Batches may be in pinned memory that torch does not know, so the caller
                copies them to that device by a :class:`NativeCopier`.
        """
        if self._is_list:
            first = 0 if self._loaded is None else self._loaded["batches"]
            return self._begin(Epoch(self, itertools.islice(self._loader, first, None), at=first))
        batches = iter(self._loader)
        return self._begin(Epoch(self, batches, closes=batches is not self._loader))

    def state_now(self) -> dict[str, Any]:
        """Return the state to resume from after the last batch that was yielded."""
        return self.state_at(self._place)

    def state_at(self, place: Any) -> dict[str, Any]:
        """Return the state to resume from at a place.

        Raises:
            TypeError: the loader cannot resume in mid-epoch; the message has the reason.
        """
        if self._is_list:
            return {"batches": place} if place is not None else self._loaded or {"batches": 0}
        if not self._is_stateful:
            reason = "it has no state_dict() and load_state_dict()"
            raise TypeError(f"a {type(self._loader).__name__} cannot go on in mid-epoch: {reason}")
        if isinstance(place, Exception):
            raise place
        return self._loader.state_dict() if place is None else place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next epoch where ``state`` was saved.

        Raises:
            TypeError: the loader cannot resume in mid-epoch.
            ValueError: the state was saved by another kind of loader.
        """
        if self._is_list:
            _check_keys(state, "batches")
            check_number(state["batches"], "batches")
        elif self._is_stateful:
            self._loader.load_state_dict(state)
        else:
            self.state_at(None)
        self._resume(state)

    def _resume(self, state: Any) -> None:
        self._place, self._newest, self._loaded = None, self._begun + 1, state

    def _begin(self, epoch: Epoch) -> Epoch:
        """Give an epoch its number, and set the place to its beginning."""
        self._begun += 1
        epoch.number = self._begun
        self._place = epoch.place = self._place_in(epoch)
        return epoch

    def move(self, epoch: Epoch, place: Any) -> None:
        """Set the place, unless a newer epoch has yielded a batch."""
        if epoch.number >= self._newest:
            self._newest, self._place = epoch.number, place

    def _place_in(self, epoch: Epoch) -> Any:
        """Return the place in an epoch after its last batch. The call is cheap enough for every batch."""
        if self._is_list:
            return None if epoch.has_ended else epoch.at + epoch.count
        if not self._is_stateful:
            return None
        try:
            return copy.deepcopy(self._loader.state_dict())
        except Exception as error:  # `state_at` raises this error
            return error

    def _fetch(self, epoch: Epoch, waits: bool) -> Any:
        """Return the next batch of an epoch, which may be one of another source."""
        return next_of(epoch.batches, waits=waits)

    def _worker_died(self) -> None:
        """Handle the death of a worker process."""


class Epoch:
    """One pass over a loader. After the death of a worker process, the next batch raises a :class:`WorkerError`.

    Args:
        source: the source.
        batches: yields the batches.
        at: beginning of the epoch, in a form that only the source uses.
        inner: epoch of another source, from which the batches come.
        closes: True to close ``batches`` at the end. False for an iterator that is the loader itself.

    Attributes:
        place: place after the last batch.
        share: share of this rank in the last batch; None if the loader is not sliced.
        count: number of batches that were yielded, including exceptions in place of a batch.
        has_ended: True after the last batch.
    """

    number = 0
    place: Any = None
    share: BatchShare | None = None
    count = 0
    has_ended = False

    def __init__(
        self, source: Source, batches: Any = (), *, at: Any = None, inner: Epoch | None = None, closes: bool = True
    ) -> None:
        self.batches: Any = batches
        self.at, self.inner = at, inner
        self._source = source
        self._loaded = source._loaded
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
        batches = self.batches
        if batches is None:
            raise StopIteration
        try:
            batch = self._source._fetch(self, waits)
        except StopIteration:
            self.has_ended = True
            self._moved()
            self.close()
            raise
        except NotReady:
            raise
        except Exception as error:
            self.count += 1
            self._moved()
            if death := death_of_a_worker(batches, error):
                self._source._worker_died()
                self.close()
                raise WorkerError(death) from error
            raise
        self.count += 1
        self._moved()
        return batch

    def _moved(self) -> None:
        self.place = self._source._place_in(self)
        self._source.move(self, self.place)
        if self._source._loaded is self._loaded:
            self._source._loaded = None

    def close(self) -> None:
        """Drop the loader's iterator and its workers."""
        batches, self.batches = self.batches, None
        close = getattr(batches, "close", None)
        if self._closes and callable(close):
            close()
        if self.inner is not None:
            self.inner.close()


class SlicedSource(Source):
    """Slices of the batches of a loader that every rank iterates as a whole, with the random numbers of rank 0."""

    def __init__(self, loader: SlicedLoader) -> None:
        super().__init__(loader)
        self._source = source_of(loader.loader)
        self.is_fresh = self._source.is_fresh

    def open(self, pinned_for: int | None = None) -> Epoch:
        draws = SharedDraws(self._loader.ranks, RandomState.only(generators_in(self._loader)))
        with draws.drawing():
            whole = self._source.open(pinned_for)
        return self._begin(Epoch(self, inner=whole, at=draws))

    def _fetch(self, epoch: Epoch, waits: bool) -> Any:
        assert epoch.inner is not None
        with epoch.at.drawing():
            batch = epoch.inner.next(waits=waits)
        batch, epoch.share = self._loader.own_part(batch)
        return batch

    def _place_in(self, epoch: Epoch) -> Any:
        return epoch.inner and epoch.inner.place

    def state_at(self, place: Any) -> dict[str, Any]:
        return self._source.state_at(place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)
        self._resume(None)


class IterableSource(Source):
    """Batches of a ``DataLoader`` over an iterable dataset, which holds the position."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._dataset: Any = loader.dataset
        self._persistent: DataLoader[Any] | None = None
        self.is_fresh = _is_fresh(loader)

    def open(self, pinned_for: int | None = None) -> Epoch:
        goes_on = self._loaded is not None and self._loaded["is_under_way"]
        twin = self._persistent
        if twin is None:  # `or` would call the twin's len()
            twin = _twin(self._loader, worker_seed=0 if goes_on else None)
        self._persistent = twin if twin.persistent_workers else None
        # Lets the twin warn, as torch does, when it yields more batches than `len(loader)`.
        twin._IterableDataset_len_called = self._loader._IterableDataset_len_called
        batches = iter(twin)
        was_last = goes_on and self._loaded["was_last"]
        return self._begin(Epoch(self, iter(()) if was_last else batches, at=was_last))

    def _place_in(self, epoch: Epoch) -> Any:
        if self._why_not():
            return None
        # After a batch that is smaller than the others, `ended` of the fetcher is True.
        fetcher = getattr(epoch.batches, "_dataset_fetcher", None)
        was_last = getattr(fetcher, "ended", False) if epoch.count else epoch.at
        return self._state(is_under_way=not epoch.has_ended, was_last=was_last)

    def state_at(self, place: Any) -> dict[str, Any]:
        if reason := self._why_not():
            raise TypeError(f"a DataLoader over a {type(self._dataset).__name__} cannot go on in mid-epoch: {reason}")
        return place or self._loaded or self._state(is_under_way=False, was_last=False)

    def _state(self, *, is_under_way: bool, was_last: bool) -> dict[str, Any]:
        state = copy.deepcopy(self._dataset.state_dict())
        return {"dataset": state, "is_under_way": is_under_way, "was_last": was_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_at(None)
        _check_keys(state, "dataset", "is_under_way", "was_last")
        self._dataset.load_state_dict(state["dataset"])
        self._resume(state)

    def _why_not(self) -> str:
        if not hasattr(self._dataset, "state_dict") or not hasattr(self._dataset, "load_state_dict"):
            return "its iterable dataset lacks state_dict() or load_state_dict()"
        if self._loader.num_workers:
            return "its state is in worker processes (num_workers=0, or torchdata's StatefulDataLoader, would do)"
        return ""

    def _worker_died(self) -> None:
        self._persistent = None


class IndexedSource(Source):
    """Batches of a ``DataLoader`` over a map-style dataset, whose place is that in the order of its samples.

    A ``DataLoader`` with any number of workers and an ``InMemoryLoader`` have the same state. A sliced loader
    (:func:`flatout.data.slices.sliced`) has the state of the loader of whole batches, on all ranks.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._slices = slices_of(loader)
        self._whole = unsliced(loader)
        self._draws: SharedDraws | None = None
        self._worker_seed = 0
        self._has_run = False
        """True once an epoch has begun, in this process or before the loaded state was saved."""

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Return the context in which an epoch begins and draws the seed of its workers.

        For a sliced loader this is a collective, and all ranks draw the numbers of rank 0.
        """
        if self._slices is None:
            yield
        else:
            self._draws = SharedDraws(self._slices.ranks, self._held_generators())
            with self._draws.drawing():
                yield
        self._has_run = True

    def _order(self, samples: int | None) -> Order:
        """Return the order of a new epoch, or the rest of the loaded epoch. Call this in ``_opening``.

        The random generators advance as in ``iter`` of the loader's batch sampler.

        Args:
            samples: number of samples in the dataset, if rows of tensors are gathered; else None.

        Raises:
            ValueError: a sampler without ``state_dict`` does not draw the batches before the loaded place again.
        """
        loaded = self._loaded
        if loaded is not None:
            self._held_generators().write(loaded["generators"])
        order = Order(
            self._whole,
            samples,
            held=self._samplers_generators,
            draws=self._draws,
            slices=self._slices,
            start=None if loaded is None else loaded["position"],
        )
        if loaded is not None:
            self._held_generators().write(loaded["generators"])
        order.worker_seed = self._worker_seed
        return order

    @property
    def _draws_no_seed(self) -> bool:
        """True if the seed of persistent workers was drawn in an earlier epoch, of this loader or of its original."""
        return self._has_run and seeds_workers_once(self._loader)

    def state_at(self, place: Any) -> dict[str, Any]:
        if place is None and self._loaded is not None:
            return self._loaded
        return {
            "version": _VERSION,
            "loader": self._traits(),
            "position": None if place is None else place[0].position(*place[1:3]),
            "generators": self._held_generators().states(),
            "has_run": self._has_run,
            "worker_seed": self._worker_seed if place is None else place[0].worker_seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.get("version") not in (1, _VERSION):
            raise ValueError(f"state must come from state_dict() of a flatout loader of this kind, version {_VERSION}")
        for name, here in self._traits().items():
            if state["loader"].get(name) != here:
                raise ValueError(
                    f"the state was saved with {name} = {state['loader'].get(name)!r}, this loader has {here!r}"
                )
        state = _of_version_2(state)
        _check_position(state["position"], RandomState.of(self._samplers_generators))
        check_kinds(state["has_run"], False, "has_run")
        check_number(state["worker_seed"], "worker_seed", least=-(2**63))
        held = self._held_generators()
        held.write(state["generators"])
        if state["position"] is not None:  # `_order` writes the states, and the write above only checks them
            held.restore()
        self._has_run, self._worker_seed = state["has_run"], state["worker_seed"]
        self._resume(None if state["position"] is None else state)

    @functools.cached_property
    def _samplers_generators(self) -> list[Any]:
        sampler = _sampler(self._whole)
        return generators_in(getattr(sampler, "generator", None) if type(sampler) in TORCHS_SAMPLERS else sampler)

    def _held_generators(self) -> RandomState:
        """Return the generators that the loader and its sampler hold."""
        loaders, samplers = self._whole.generator, self._samplers_generators
        is_samplers = loaders is None or any(loaders is generator for generator in samplers)
        return RandomState.only(samplers if is_samplers else [loaders, *samplers])

    def _traits(self) -> dict[str, Any]:
        """Return the settings that must be equal for a state to mean the same samples."""
        sampler = _sampler(self._whole)
        traits = {
            "sampler": type(sampler).__name__,
            "batch_size": self._whole.batch_size,
            "drop_last": self._whole.drop_last,
        }
        if type(sampler) in TORCHS_SAMPLERS:
            traits["length"] = len(sampler)
            for name in ("replacement", "num_replicas", "rank"):
                if hasattr(sampler, name):
                    traits[name] = getattr(sampler, name)
        return traits


class MapStyleSource(IndexedSource):
    """Batches of a twin of the user's ``DataLoader``, which draws the user's batches and can begin in mid-epoch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._persistent: DataLoader[Any] | None = None
        self.is_fresh = _is_fresh(loader)

    def open(self, pinned_for: int | None = None) -> Epoch:
        if self._loaded is not None:
            self._persistent = None  # the twin of an epoch that began but yielded no batch
        with self._opening():
            twin = self._make_twin() if self._persistent is None else self._persistent
            sampler: _TwinSampler = twin.sampler if twin.batch_sampler is None else twin.batch_sampler  # type: ignore[assignment]
            batches: Any = iter(twin)
        self._persistent = twin if twin.persistent_workers else None
        # torch draws no seed for workers that are alive. The user's workers would be new ones.
        sampler.draws_seed = not seeds_workers_once(self._loader)
        order, sampler.order, sampler.is_begun = sampler.order, None, False
        assert order is not None
        order.worker_seed = batches._base_seed if sampler.shared_seed is None else sampler.shared_seed
        self._worker_seed = order.worker_seed
        return self._begin(Epoch(self, batches, at=(order, order.begun, 0)))

    def _make_twin(self) -> DataLoader[Any]:
        sampler, seed = _TwinSampler(self._loader, weakref.WeakMethod(self._order)), None
        if self._loaded is not None or self._draws_no_seed:
            # The same worker seeds would repeat the augmentation of the epoch's first batches.
            seed = self._worker_seed if self._loaded is None else self._worker_seed + self._loaded["position"]["taken"]
            sampler.begin()  # before the workers start, because a sampler that draws other batches is an error
            sampler.is_begun = True
        role = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        twin = _twin(self._loader, seed, **{role: sampler})
        if self._slices is not None and self._slices.ranks.rank and twin.num_workers:
            sampler.seed_apart(twin, self._slices.ranks.rank)
        return twin

    def _place_in(self, epoch: Epoch) -> Any:
        if epoch.has_ended:
            return None
        order = epoch.at[0]
        # Number of batches that workers have sent, exceptions included. Without workers, each drawn batch has passed.
        arrived = getattr(epoch.batches, "_rcvd_idx", order.passed + len(order.given))
        while order.passed < arrived and order.given:  # a sampler that raised has drawn no batch
            order.passed += 1
            run, number = order.given.popleft()
            epoch.share, epoch.at = run.share, (order, run, number)
        return (*epoch.at, self._dataset_state())

    def _dataset_state(self) -> Any:
        """Return the dataset's state, or None. States of its copies in worker processes are unknown."""
        dataset: Any = self._loader.dataset
        if self._loader.num_workers or not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
            return None
        return copy.deepcopy(dataset.state_dict())

    def state_at(self, place: Any) -> dict[str, Any]:
        if self._loader.num_workers and not self._loader.in_order:
            raise TypeError("a DataLoader with in_order=False cannot go on in mid-epoch: any batch may be missing")
        dataset = self._dataset_state() if place is None else place[3]
        return super().state_at(place) | ({} if dataset is None else {"dataset": dataset})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        dataset: Any = self._loader.dataset
        if "dataset" in state and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self._persistent = None

    def _worker_died(self) -> None:
        self._persistent = None


class _TwinSampler:
    """Sampler of a twin, which yields the batches of the source's orders.

    Args:
        loader: the user's loader.
        make_order: weak reference to the source's function, because the source may hold the twin and its workers.

    Attributes:
        order: order that began last.
        is_begun: True if the order of the next epoch has begun.
        draws_seed: True to draw the seed of an epoch in place of torch, which draws none for workers that are alive.
        shared_seed: seed of rank 0's workers, from which this rank derives its own; None if both are the same.
    """

    def __init__(self, loader: DataLoader[Any], make_order: weakref.WeakMethod[Callable[[None], Order]]) -> None:
        self._loader, self._make_order = loader, make_order
        self.order: Order | None = None
        self.is_begun = self.draws_seed = False
        self.shared_seed: int | None = None
        self._apart: tuple[Any, torch.Generator, int] | None = None

    def begin(self) -> None:
        """Begin the order of the next epoch."""
        make_order = self._make_order()
        assert make_order is not None  # only the source iterates its twin
        self.order = make_order(None)

    def seed_apart(self, twin: DataLoader[Any], rank: int) -> None:
        """Give the workers of a twin other seeds than those of rank 0."""
        self._apart = twin.generator, torch.Generator(), rank
        twin.generator = self._apart[1]

    def __iter__(self) -> Iterator[Any]:
        # DataLoader iterates its sampler twice before its first workers load. A resumed epoch, and an epoch after
        # persistent workers, have begun in `_make_twin`.
        if not self.is_begun:
            self.begin()
            if self.draws_seed:
                draw_seed(self._loader.generator)
        if self._apart is not None and self.shared_seed is None:
            generator, own, rank = self._apart
            self.shared_seed = draw_seed(generator)
            own.manual_seed(mixed(self.shared_seed, rank))
        assert self.order is not None
        return self.order

    def __len__(self) -> int:
        return len(self._loader)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of an epoch's workers, as ``iter`` of a ``DataLoader`` does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _twin(loader: DataLoader[Any], worker_seed: int | None, **changes: Any) -> DataLoader[Any]:
    """Return a twin of the user's loader, which keeps workers' exceptions whole."""
    if loader.num_workers:
        changes["worker_init_fn"] = InWorker(loader.worker_init_fn)
    if worker_seed is not None:
        # The start of an epoch draws a seed for the workers, which the user's generator has already given.
        changes["generator"] = torch.Generator().manual_seed(worker_seed)
    return clone_loader(loader, **changes)


def _is_fresh(loader: DataLoader[Any]) -> bool:
    # torch's pin thread copies each batch of a worker. Without workers, the collate function may pin a batch and fill
    # the same memory again.
    return loader.pin_memory and loader.num_workers > 0


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that decides the order of samples: the user's sampler or batch sampler."""
    return decisive(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def _of_version_2(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in the form of version 2.

    In version 1, the position of torch's samplers was a generator's state before the last block of indices that was
    drawn. The rest of that epoch then counts as an epoch of its own.
    """
    position = state["position"]
    state = {"has_run": False, "worker_seed": 0} | state
    if state["version"] == _VERSION or position is None:
        return state | {"version": _VERSION}
    check_kinds(position, {}, "position")
    state |= {"version": _VERSION, "worker_seed": position.get("worker_seed", state["worker_seed"])}
    if "block" not in position:
        return state
    check_number(position["taken"], "position['taken']")
    old = {name: position[name] for name in ("block", "offset", "before")}
    rest = {"taken": 0, "drawn": 0, "generators": []}
    return state | {"position": rest if old["block"] == -1 else rest | {"version_1": old}}


def _check_position(position: Any, generators: RandomState) -> None:
    """Refuse a position that no order can have.

    Raises:
        ValueError: an entry is wrong. The message names the entry.
        Exception: the error of a generator that refuses its state.
    """
    if position is None:
        return
    check_kinds(position, {}, "position")
    check_number(position["taken"], "position['taken']")
    if "sampler" in position:
        check_kinds(position["was_last"], False, "position['was_last']")
        return
    check_number(position["drawn"], "position['drawn']")
    check_kinds(position["generators"], [], "position['generators']")
    if position.get("epoch") is not None:
        check_number(position["epoch"], "position['epoch']")
    for states in position["generators"]:
        generators.write(states)
        generators.restore()
    old = position.get("version_1", {"block": 0, "offset": 0, "before": None})
    for name in ("block", "offset"):
        check_number(old[name], f"position[{name!r}]")
    if old["before"] is not None:
        torch.Generator().set_state(old["before"])


def _check_keys(state: dict[str, Any], *names: str) -> None:
    """Raise a ValueError unless the state has exactly these keys."""
    if set(state) != set(names):
        raise ValueError(f"the state was saved by a loader of another kind: it holds {', '.join(state)}")


def source_of(loader: Any) -> Source:
    """Return the source for a loader. A source is returned as given."""
    if isinstance(loader, Source):
        return loader
    if type(loader) is SlicedLoader:
        return SlicedSource(loader)
    if is_plain(loader) and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return IterableSource(loader) if isinstance(loader.dataset, IterableDataset) else MapStyleSource(loader)
    return Source(loader)

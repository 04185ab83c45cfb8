"""Progress of a ``DataLoader`` within an epoch, as a state to save and to resume from."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from flatout.core.kinds import check_kinds, check_number
from flatout.core.random_state import RandomState, generators_in
from flatout.core.torch_state import serial
from flatout.data.custom_order import Asked
from flatout.data.draws import Draws, SharedDraws
from flatout.data.loaders import TORCHS_SAMPLERS, unsliced
from flatout.data.order import IndexSpan, OpaqueBatch, Order, Position, RecordedOrder, blocks_of
from flatout.data.slices import SlicedOrder, slices_of

_VERSION = 1


class Progress:
    """Position in an epoch after the last batch that was yielded.

    A ``DataLoader`` with any number of workers and an ``InMemoryLoader`` have the same state. Resuming draws one block
    of indices with torch's samplers and no index with samplers that have ``state_dict`` and ``load_state_dict``. With
    other samplers it draws the epoch's indices again. Resuming never reads samples of the dataset again.

    A sliced loader (:func:`flatout.data.slices.sliced`) has the state of the loader of whole batches, on all ranks.

    Args:
        loader: a loader over a map-style dataset.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._slices = slices_of(loader)
        self._loader = unsliced(loader)
        self._draws = Draws()
        self.has_run = False
        """True once an epoch has begun, in this process or before the loaded state was saved."""
        self._order: Order | None = None
        self._numbers: weakref.WeakKeyDictionary[Order, int] = weakref.WeakKeyDictionary()
        """Orders and their numbers, counted as they begin. Loading a state removes all of them."""
        self._begun = 0
        self._newest_taken = 0
        """Number of the newest order that yielded a batch."""
        self._position: Position | None = None
        self._reached: tuple[IndexSpan | OpaqueBatch, int] | None = None
        self._loaded: dict[str, Any] | None = None

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Return the context in which an epoch begins and draws the seed of its workers.

        For a sliced loader this is a collective. All ranks then draw the numbers of rank 0, up to the first batch.
        """
        if self._slices is None:
            yield
            return
        draws = self._draws = SharedDraws(self._slices.ranks, self._held_generators())
        with draws.drawing():
            yield
            assert isinstance(self._order, SlicedOrder)
            self._order.draw()

    @property
    def rank(self) -> int:
        """Number of this rank, from 0; 0 if the loader is not sliced."""
        return 0 if self._slices is None else self._slices.ranks.rank

    def begin(self, samples: int | None, *, reads_ahead: bool = False) -> Order:
        """Return the order of a new epoch, or the rest of the loaded epoch. Call this in ``opening``.

        The random generators advance as in ``iter`` of the loader's batch sampler.

        Args:
            samples: number of samples in the dataset. With ``None`` only the dataset interprets indices. Then batches
                of samplers that are not torch's stay :class:`OpaqueBatch`, and indices of a ``SubsetRandomSampler`` are
                positions in its ``indices``.
            reads_ahead: True if a batch may be requested before earlier ones are yielded.

        Raises:
            ValueError: a sampler without ``state_dict`` does not draw the batches before the saved position again.
        """
        loaded = self._loaded
        start = loaded and loaded["position"]
        batch_sampler = _batch_sampler(self._loader)
        order: Order | None = None
        if type(batch_sampler) is BatchSampler:
            with serial():
                blocks = blocks_of(batch_sampler.sampler, samples)
                order = None if blocks is None else RecordedOrder(batch_sampler, blocks, start)
        if order is None:
            held = self._samplers_generators
            order = Asked(batch_sampler, samples, start, held, reads_ahead=reads_ahead, draws=self._draws)
        if self._slices is not None:
            order = SlicedOrder(order, self._slices)
        if loaded is not None:
            self._held_generators().write(loaded["generators"])
        self._begun += 1
        self._numbers[order] = self._begun
        self._order, self._position, self._reached = order, order.position(), None
        return order  # another thread may have replaced self._order

    @property
    def goes_on(self) -> bool:
        """True if the next epoch is the rest of a loaded one, whose seeds were drawn at its beginning."""
        return self._loaded is not None

    def reached(self, order: Order, span: IndexSpan | OpaqueBatch, batch: int) -> None:
        """Record that the ``batch``-th batch of ``span``, counted from 1, was yielded."""
        if self._counts(order):
            self._order, self._reached, self._loaded = order, (span, batch), None

    def ended(self, order: Order) -> None:
        """Record that all batches of ``order`` were yielded."""
        if self._counts(order):
            self._order, self._position, self._reached, self._loaded = order, None, None, None

    def _counts(self, order: Order) -> bool:
        """Return True if no newer order has yielded a batch. Newer orders that only began do not count."""
        number = self._numbers.get(order, -1)
        if number < self._newest_taken:
            return False
        self._newest_taken = number
        return True

    @property
    def position(self) -> Position | None:
        """Position after the last batch that was yielded; ``None`` between epochs."""
        if self._reached is None or self._order is None:
            return self._position
        span, batch = self._reached
        return span.behind(batch) or self._order.position()

    def state_dict(self, position: Position | None) -> dict[str, Any]:
        """Return the state to resume from ``position``, made of tensors, numbers, strings, lists and dicts."""
        if self._loaded is not None:
            return self._loaded
        # If the sampler has drawn for batches that are not yet yielded, its generator is ahead of the position. Then
        # resuming draws these numbers again, and the generator is left out of the state.
        is_ahead = False
        if position is not None and self._order is not None:
            is_ahead = self._order.has_drawn_since(position)
            position = self._order.completed(position)
        generators = self._held_generators(without_samplers=is_ahead).states()
        return {
            "version": _VERSION,
            "loader": self._traits(),
            "position": position,
            "generators": generators,
            "has_run": self.has_run,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state`` in the next epoch.

        Raises:
            ValueError: ``state`` was saved by a loader of another kind. The message names the difference.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise ValueError(f"state must come from state_dict() of a flatout loader, version {_VERSION}")
        for name, here in self._traits().items():
            if state["loader"].get(name) != here:
                raise ValueError(
                    f"the state was saved with {name} = {state['loader'].get(name)!r}, this loader has {here!r}"
                )
        position, has_run = state["position"], state.get("has_run", False)
        _check_position(position)
        check_kinds(has_run, False, "has_run")
        held = self._held_generators()
        held.write(state["generators"])
        if position is not None:  # `begin` writes the states, and the write above only checks them
            held.restore()
        self._order, self._position, self._reached, self._loaded = None, position, None, position and state
        self._numbers.clear()
        self.has_run = has_run

    @functools.cached_property
    def _samplers_generators(self) -> list[Any]:
        sampler = _sampler(self._loader)
        return generators_in(getattr(sampler, "generator", None) if type(sampler) in TORCHS_SAMPLERS else sampler)

    def _held_generators(self, *, without_samplers: bool = False) -> RandomState:
        """Return the generators that the loader and its sampler hold."""
        loaders, samplers = self._loader.generator, self._samplers_generators
        is_samplers = any(loaders is generator for generator in samplers)
        held = [] if loaders is None or is_samplers else [loaders]
        return RandomState.only(held if without_samplers else held + samplers)

    def _traits(self) -> dict[str, Any]:
        """Return the settings that must be equal for a state to mean the same samples."""
        sampler = _sampler(self._loader)
        traits = {
            "sampler": type(sampler).__name__,
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
        }
        if type(sampler) in TORCHS_SAMPLERS:
            traits["length"] = len(sampler)
            for name in ("replacement", "num_replicas", "rank"):
                if hasattr(sampler, name):
                    traits[name] = getattr(sampler, name)
        return traits


def _check_position(position: Any) -> None:
    """Refuse a position that no order can have, by the entries that torch's samplers need.

    Raises:
        ValueError: an entry is wrong. The message names the entry.
        Exception: torch's error if ``before`` is not the state of a generator.
    """
    if position is None:
        return
    check_kinds(position, {}, "position")
    for name in ("taken", "offset", "worker_seed"):
        check_number(position.get(name, 0), f"position[{name!r}]")
    check_number(position.get("block", 0), "position['block']", least=-1)
    if position.get("before") is not None:
        torch.Generator().set_state(position["before"])


def _sampler(loader: DataLoader) -> Any:
    """Return the sampler that decides the order of samples: the user's sampler or batch sampler."""
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def _batch_sampler(loader: DataLoader) -> Any:
    """Return the loader's batch sampler, or one with batches of one sample if the loader does not batch."""
    if loader.batch_sampler is not None:
        return loader.batch_sampler
    if type(loader.sampler) in TORCHS_SAMPLERS:
        return BatchSampler(loader.sampler, 1, drop_last=False)
    return _OneByOne(loader.sampler)


class _OneByOne:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return ([index] for index in self.sampler)  # a generator expression calls `iter(self.sampler)` at once

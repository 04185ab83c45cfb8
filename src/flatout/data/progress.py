"""How far the batches of a ``DataLoader`` have been read: a state to save, and to go on from."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flatout.data.generators import RandomState
from flatout.data.order import Foreign, Order, Position, Span, order_of, plain_indices

_OWN_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_VERSION = 1


class Progress:
    """Where in an epoch the batches that were handed out end.

    The state is the same whoever hands them out, a ``DataLoader`` with any number of workers or an
    ``InMemoryLoader``; going on from it costs what drawing one block of indices costs with torch's own samplers,
    nothing with samplers that have ``state_dict`` and ``load_state_dict``, and with all others drawing the epoch's
    indices again. The dataset is not asked for what was read.

    Args:
        loader: over a map-style dataset.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._order: Order | None = None
        self._position: Position | None = None
        self._reached: tuple[Span | Foreign, int] | None = None
        self._loaded: dict[str, Any] | None = None

    def begin(self, samples: int | None) -> Order:
        """The epoch's order: a new one, or the rest of the one that a loaded state was saved in."""
        loaded = self._loaded
        self._order = order_of(_index_sampler(self._loader), samples, loaded and loaded["position"])
        if loaded is not None:
            self._held_generators().write(loaded["generators"])
        self._position, self._reached = self._order.position(), None
        return self._order

    @property
    def goes_on(self) -> bool:
        """Whether the next epoch is the rest of one: what is drawn at an epoch's begin was drawn then."""
        return self._loaded is not None

    def has_begun(self) -> None:
        """The epoch after this one is a whole one again."""
        self._loaded = None

    def reached(self, order: Order, span: Span | Foreign, batch: int) -> None:
        """The ``batch``-th batch of ``span`` was handed out, counted from 1."""
        if order is self._order:
            self._reached = span, batch

    def ended(self, order: Order) -> None:
        """All batches of ``order`` were handed out."""
        if order is self._order:
            self._position, self._reached = None, None

    @property
    def position(self) -> Position | None:
        """What the last batch handed out reached; ``None`` between epochs."""
        if self._reached is not None:
            span, batch = self._reached
            return span.behind(batch)
        return self._position

    def state_dict(self, position: Position | None) -> dict[str, Any]:
        """What it takes to go on from ``position``, of tensors, numbers, strings, lists and dicts."""
        if self._loaded is not None:
            return self._loaded
        if position is not None and "last" in position:  # as the sampler gave it
            position = position | {"last": plain_indices(position["last"])}
        # The sampler may have drawn for batches that are not handed out yet: drawing the position's block again then
        # brings its generator to where it belongs.
        is_ahead = position is not None and self._order is not None and self._order.has_drawn_since(position)
        generators = self._held_generators(without_sampler=is_ahead).states()
        return {"version": _VERSION, "loader": self._traits(), "position": position, "generators": generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch go on from ``state``.

        Raises:
            ValueError: it was saved by a loader of another kind; the message names the difference.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise ValueError(f"state must come from state_dict() of a flatout loader, version {_VERSION}")
        for name, here in self._traits().items():
            if state["loader"].get(name) != here:
                raise ValueError(
                    f"the state was saved with {name} = {state['loader'].get(name)!r}, here it is {here!r}"
                )
        self._order, self._position, self._reached, self._loaded = None, state["position"], None, None
        if state["position"] is None:
            self._held_generators().write(state["generators"])
        else:
            self._loaded = state

    def _held_generators(self, *, without_sampler: bool = False) -> RandomState:
        """The generators that the loader and its sampler hold."""
        sampler, loaders = _sampler(self._loader), self._loader.generator
        samplers = getattr(sampler, "generator", None)
        if without_sampler:
            return RandomState.held_by([] if loaders is samplers else [loaders])
        return RandomState.held_by([loaders, samplers if type(sampler) in _OWN_SAMPLERS else sampler])

    def _traits(self) -> dict[str, Any]:
        """What has to be the same for the state to mean the same samples."""
        sampler = _sampler(self._loader)
        traits = {
            "sampler": type(sampler).__name__,
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
        }
        for name in ("num_samples", "replacement", "num_replicas", "rank"):
            if type(sampler) in _OWN_SAMPLERS and hasattr(sampler, name):
                traits[name] = getattr(sampler, name)
        return traits


def _sampler(loader: DataLoader) -> Any:
    """What decides about the order of the samples."""
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def _index_sampler(loader: DataLoader) -> Any:
    """The batch sampler; without batches, one that makes batches of one."""
    return BatchSampler(loader.sampler, 1, drop_last=False) if loader.batch_sampler is None else loader.batch_sampler

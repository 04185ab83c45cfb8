"""The order and the random numbers of a plain ``DataLoader(num_workers=0)``, without its lists of indices.

torch draws random numbers at certain moments, and a loader that is to leave every generator in the same state has to
draw at the same ones (torch/utils/data/dataloader.py, sampler.py):

1. ``iter(loader)``: ``iter(batch_sampler)``, then one int64, the base seed, from ``loader.generator`` (default
   generator if ``None``);
2. whenever a batch needs an index that has not been drawn, its sampler draws the next block of them: a permutation,
   32 numbers with replacement, everything at once. A full batch needs no more than its own indices; a partial one has
   asked the sampler for more, and a ``RandomSampler`` then draws a last block, even one that it throws away.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
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

Position = dict[str, Any]
"""Where in an epoch the next batch begins: what an order of the same samplers needs to go on there. Made of tensors,
numbers, strings, lists and dicts, and of what a sampler's own ``state_dict`` holds."""


@dataclass(frozen=True)
class Span:
    """Batches of ``count`` samples each, one behind the other.

    Their samples are ``indices`` (int64 ``[batches * count]``), or ``first, first + 1, ...`` where they are ``None``.
    """

    indices: Tensor | None
    first: int
    count: int
    batches: int
    end: Position

    def behind(self, batch: int) -> Position:
        """Where the batch behind the ``batch``-th begins, counted from 1."""
        back = (self.batches - batch) * self.count
        return self.end | {"taken": self.end["taken"] - back, "offset": self.end["offset"] - back} if back else self.end


@dataclass(frozen=True)
class Foreign:
    """One batch of which only the dataset knows what its indices mean: no ints, or out of range."""

    indices: Any
    end: Position

    def behind(self, batch: int) -> Position:
        """Where the next batch begins."""
        return self.end


class Order(Protocol):
    """One epoch's batches, in order."""

    def next_span(self, *, asked: bool) -> Span | Foreign | None:
        """The next batches, as many as are drawn already but at least one; with ``asked``, ``None`` behind the last.

        Unless ``asked``, when the user wants the very next batch, nothing is drawn that somebody else could see: then
        ``None`` may also mean that the batch has to be asked for.
        """

    def position(self) -> Position:
        """Where the batch behind those that were given begins."""

    def has_drawn_since(self, position: Position) -> bool:
        """Whether a generator has been drawn from for batches behind ``position``."""


def why_not_ordered(loader: DataLoader) -> str | None:
    """Why :func:`order_of` cannot stand in for the samplers of ``loader``; ``None`` if it can."""
    if loader.batch_sampler is None:
        return "batch_size=None: samples are not batched"
    if loader.num_workers > 0 and loader.worker_init_fn is not None:
        return "worker_init_fn runs in worker processes only"
    return None


def order_of(batch_sampler: Any, samples: int | None, start: Position | None = None) -> Order:
    """An epoch of ``batch_sampler``; making it is what ``iter(batch_sampler)`` is to the generators.

    Args:
        batch_sampler: that of a ``DataLoader``.
        samples: in the dataset. ``None``: what the indices mean is left to the dataset; batches of samplers that are
            not torch's own stay :class:`Foreign`, and those of a ``SubsetRandomSampler`` are places in its ``indices``.
        start: a position in an epoch of such a batch sampler, to go on from. Generators that the samplers do not own
            are then left alone.

    Raises:
        ValueError: a sampler without ``state_dict`` draws other batches than those before ``start``.
    """
    blocks = None
    if type(batch_sampler) is BatchSampler:
        blocks = _blocks_of(batch_sampler.sampler, samples)
    if blocks is None:
        return _Asked(batch_sampler, samples, start)
    return _Replayed(batch_sampler, blocks, start)


_Draw = Callable[[int, torch.Generator | None], Tensor | None]
"""Makes a block of indices, int64 ``[n]``, by its number and with a generator; ``None`` behind the last."""


class _Blocks:
    """The indices of an epoch in blocks, each drawn as it is asked for.

    Args:
        draw: makes the blocks.
        generator: gives what is drawn from when the first block is; without it nothing is drawn.
        is_users: that is a generator of the user's own, who sees what is drawn from it.
    """

    def __init__(
        self, draw: _Draw, generator: Callable[[], torch.Generator] | None = None, *, is_users: bool = False
    ) -> None:
        self.is_users = is_users
        self.drawn = 0
        self.before: Tensor | None = None
        """State of the generator before it drew the last block."""
        self._draw = draw
        self._make_generator = generator
        self._generator: torch.Generator | None = None

    def next(self) -> Tensor | None:
        """The next block."""
        if self._generator is None and self._make_generator is not None:
            self._generator = self._make_generator()
        before = None if self._generator is None else self._generator.get_state()
        block = self._draw(self.drawn, self._generator)
        if block is not None:
            self.drawn, self.before = self.drawn + 1, before
        return block

    def again(self, number: int, before: Tensor | None) -> Tensor:
        """Block ``number`` once more, from a generator in the state ``before``."""
        if before is not None:
            assert self._make_generator is not None
            # Any other generator dies with the epoch, or is torch's default one and was moved in the first run.
            self._generator = self._make_generator() if self.is_users else torch.Generator()
            self._generator.set_state(before)
        self.drawn = number
        block = self.next()
        assert block is not None
        return block


def _blocks_of(sampler: Any, samples: int | None) -> _Blocks | None:
    """The indices of an epoch of ``sampler``.

    ``None`` unless the sampler is torch's own, draws on the host, and draws nothing that the dataset does not have.
    """
    most = sys.maxsize if samples is None else samples
    generator = getattr(sampler, "generator", None)
    if generator is not None and generator.device.type != "cpu":
        return None
    is_users = generator is not None
    if type(sampler) is SubsetRandomSampler:
        indices = torch.arange(len(sampler.indices)) if samples is None else as_indices(sampler.indices, samples)
        if indices is None:
            return None
        draw = _once(lambda generator: indices[torch.randperm(len(indices), generator=generator)])
        return _Blocks(draw, lambda: generator or torch.default_generator, is_users=is_users)
    if type(sampler) is SequentialSampler and len(sampler.data_source) <= most:
        return _Blocks(_once(lambda _: torch.arange(len(sampler))))
    if type(sampler) is RandomSampler and len(sampler.data_source) <= most:
        return _Blocks(_random_block(sampler), lambda: generator or _seeded(), is_users=is_users)
    if type(sampler) is WeightedRandomSampler and len(sampler.weights) <= most:
        return _Blocks(_weighted(sampler), lambda: generator or torch.default_generator, is_users=is_users)
    if type(sampler) is DistributedSampler and len(sampler.dataset) <= most:  # type: ignore[arg-type]
        return _Blocks(_share(sampler), lambda: torch.Generator().manual_seed(sampler.seed + sampler.epoch))
    return None


def as_indices(indices: Sequence[int], samples: int) -> Tensor | None:
    """int64 ``[n]``, counted from the front; ``None`` where something is no int, or not in the dataset."""
    if not isinstance(indices, (Tensor, np.ndarray, range)) and not all(map(_is_int, indices)):
        return None
    found = torch.as_tensor(indices) if len(indices) else torch.empty(0, dtype=torch.int64)
    if found.dim() != 1 or found.dtype in (torch.bool, torch.uint64) or found.dtype.is_floating_point:
        return None
    found = found.to(torch.int64)
    if found.numel() and not (-samples <= int(found.min()) and int(found.max()) < samples):
        return None
    return torch.where(found < 0, found + samples, found)


def _is_int(index: Any) -> bool:
    return type(index) is int or isinstance(index, np.integer)


class _Replayed:
    """Draws as torch's samplers do, whole blocks of indices at a time."""

    def __init__(self, batch_sampler: BatchSampler, blocks: _Blocks, start: Position | None) -> None:
        sampler: Any = batch_sampler.sampler
        self._size = batch_sampler.batch_size
        self._drop_last = batch_sampler.drop_last
        self._sequential = type(sampler) is SequentialSampler
        self._blocks = blocks
        # Of several blocks the later ones are drawn in mid-epoch; a generator that the sampler makes dies with it.
        self._is_seen = type(sampler) is RandomSampler and blocks.is_users
        self._taken = 0
        self._drawn = 0
        self._left = torch.empty(0, dtype=torch.int64)  # drawn, not taken; of the last block alone
        self._last_block = 0
        if start is not None and start["taken"] > 0:
            block = blocks.again(start["block"], start["before"])
            self._left, self._last_block = block[start["offset"] :], len(block)
            self._taken = start["taken"]
            self._drawn = self._taken + len(self._left)

    def next_span(self, *, asked: bool) -> Span | None:
        end = self._taken + self._size
        if self._drawn < end and (asked or (self._drawn and not self._is_seen)):
            self._draw(end)
        count = min(self._size, self._drawn - self._taken)
        if count < self._size and (not asked or self._drop_last or count == 0):
            return None
        batches = len(self._left) // count
        indices = None if self._sequential else self._left[: batches * count]
        first = self._taken
        self._left = self._left[batches * count :]
        self._taken += batches * count
        return Span(indices, first, count, batches, self.position())

    def _draw(self, end: int) -> None:
        parts = [self._left]
        while self._drawn < end and (block := self._blocks.next()) is not None:
            parts.append(block)
            self._drawn += len(block)
            self._last_block = len(block)
        parts = [part for part in parts if len(part)]
        if parts:
            self._left = parts[0] if len(parts) == 1 else torch.cat(parts)

    def position(self) -> Position:
        blocks = self._blocks
        return {
            "taken": self._taken,
            "block": blocks.drawn - 1,
            "offset": self._last_block - len(self._left),
            "before": blocks.before,
        }

    def has_drawn_since(self, position: Position) -> bool:
        return self._blocks.drawn - 1 > position["block"]


def _once(draw: Callable[[Any], Tensor]) -> _Draw:
    """An epoch of one block."""
    return lambda number, generator: draw(generator) if number == 0 else None


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def _random_block(sampler: RandomSampler) -> _Draw:
    n = len(sampler.data_source)
    size = 32 if sampler.replacement else n
    whole, rest = divmod(sampler.num_samples, size)

    def draw(number: int, generator: torch.Generator | None) -> Tensor | None:
        # One block more is drawn than is whole, even if nothing of it is used: which nobody sees of a generator that
        # the sampler has made.
        if number > whole or (number == whole and rest == 0 and sampler.generator is None):
            return None
        count = size if number < whole else rest
        if sampler.replacement:
            return torch.randint(n, (count,), dtype=torch.int64, generator=generator)
        return torch.randperm(n, generator=generator)[:count]

    return draw


def _weighted(sampler: WeightedRandomSampler) -> _Draw:
    def draw(generator: Any) -> Tensor:
        return torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator)

    return _once(draw)


def _share(sampler: DistributedSampler) -> _Draw:
    """The indices of one rank: shuffled alike on all, cut or repeated to a multiple of their number."""

    def draw(generator: Any) -> Tensor:
        n = len(sampler.dataset)  # type: ignore[arg-type]
        order = torch.randperm(n, generator=generator) if sampler.shuffle else torch.arange(n)
        padded = order.repeat(-(-sampler.total_size // n))
        return padded[sampler.rank : sampler.total_size : sampler.num_replicas].contiguous()

    return _once(draw)


class _Asked:
    """Batches of any other sampler: asked when the user asks, never ahead."""

    def __init__(self, batch_sampler: Any, samples: int | None, start: Position | None) -> None:
        self._samples = samples
        self._batch_sampler = batch_sampler
        self._taken = 0
        self._last: Any = None
        self._was_last = False
        # Generators as they are now and before the first batch: what it takes to draw the epoch again.
        self._states: list[list[Any]] = []
        self._batches: Any = None
        if start is None:
            self._note_generators()
            self._batches = iter(batch_sampler)
        else:
            self._go_on(start)

    def next_span(self, *, asked: bool) -> Span | Foreign | None:
        if not asked:
            return None
        if len(self._states) == 1:
            self._note_generators()
        try:
            batch = next(self._batches)
        except StopIteration:
            return None
        self._taken += 1
        self._last = batch
        # A batch sampler that gives less than a batch has asked its sampler for more, in vain.
        self._was_last = type(self._batch_sampler) is BatchSampler and len(batch) < self._batch_sampler.batch_size
        found = None
        if self._samples is not None and type(batch) in (list, tuple) and batch:
            found = as_indices(batch, self._samples)
        return Foreign(batch, self.position()) if found is None else Span(found, 0, len(found), 1, self.position())

    def position(self) -> Position:
        position: Position = {"taken": self._taken}
        if (stateful := self._stateful()) is not None:
            return position | {"sampler": copy.deepcopy(stateful.state_dict()), "was_last": self._was_last}
        return position | {"generators": self._states, "last": self._last}

    def has_drawn_since(self, position: Position) -> bool:
        return self._taken > position["taken"]

    def _stateful(self) -> Any:
        """What of the sampler can say where it is and go on from there."""
        parts = [self._batches, self._batch_sampler]
        if type(self._batch_sampler) is BatchSampler:
            parts.append(self._batch_sampler.sampler)
        return next((part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")), None)

    def _note_generators(self) -> None:
        self._states.append(RandomState.capture(self._batch_sampler).states())

    def _go_on(self, start: Position) -> None:
        self._taken = start["taken"]
        with RandomState.capture().restored():
            if "sampler" in start:
                self._batches = iter(self._batch_sampler)
                self._stateful().load_state_dict(copy.deepcopy(start["sampler"]))
                self._was_last = start["was_last"]
                if self._was_last:
                    self._batches = iter(())
                return
            self._states = list(start["generators"])
            RandomState.capture(self._batch_sampler).write(self._states[0])
            self._batches = iter(self._batch_sampler)
            if len(self._states) > 1:
                RandomState.capture(self._batch_sampler).write(self._states[1])
                for _ in range(self._taken):
                    self._last = next(self._batches, None)
                if self._taken == 0:  # the first batch was drawn before the state was saved, and not handed out
                    self._batches = itertools.chain(list(itertools.islice(self._batches, 1)), self._batches)
        if plain_indices(self._last) != start["last"]:
            raise ValueError(
                f"{type(self._batch_sampler).__name__} drew other batches than before: to go on in mid-epoch it needs "
                "state_dict() and load_state_dict(), or to draw from generators that it holds"
            )


def plain_indices(batch: Any) -> list[int] | None:
    """The indices of a batch, where they are numbers."""
    if isinstance(batch, (list, tuple)) and all(map(_is_int, batch)):
        return [int(index) for index in batch]
    return None

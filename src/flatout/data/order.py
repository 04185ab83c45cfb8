"""Order and random numbers of a plain ``DataLoader(num_workers=0)``, without its lists of indices.

A loader that leaves every generator in the same state as torch must draw at the same moments. torch draws at these
moments (torch/utils/data/dataloader.py, sampler.py):

1. ``iter(loader)`` calls ``iter(batch_sampler)``. Then it draws one int64, the base seed, from ``loader.generator``, or
   from the default generator if ``loader.generator`` is ``None``.
2. When a batch needs an index that has not been drawn, its sampler draws the next block of indices. A block is a
   permutation, 32 numbers with replacement, or all indices at once. A full batch requests only its own indices. A
   partial batch has requested one more index. A ``RandomSampler`` then draws a last block, even if it uses no index of
   this block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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

from flatout.core.torch_state import serial

Position = dict[str, Any]
"""Position of the next batch in an epoch, from which an order of the same samplers resumes.

The values are tensors, numbers, strings, lists, dicts, and the contents of a sampler's ``state_dict``.
"""


@dataclass(frozen=True)
class BatchShare:
    """Share of one rank in a batch.

    Attributes:
        own: samples of this rank; 0 if this rank computes a stand-in, because there are fewer samples than ranks.
        total: samples of all ranks.
    """

    own: int
    total: int


@dataclass(frozen=True)
class IndexSpan:
    """Consecutive batches of ``count`` samples each.

    The samples are ``indices`` (int64 ``[batches * count]``), or ``first, first + 1, ...`` if ``indices`` is ``None``.
    """

    indices: Tensor | None
    first: int
    count: int
    batches: int
    end: Position | None
    """Position after the last batch. ``None``: the current position of the order, which draws only on request."""
    share: BatchShare | None = None
    """Share of this rank in each whole batch, if each batch here is a slice; else ``None``."""

    def behind(self, batch: int) -> Position | None:
        """Return the position after a batch, counted from 1. ``None``: the current position of the order."""
        if self.end is None:
            return None
        back = (self.batches - batch) * (self.count if self.share is None else self.share.total)
        return self.end | {"taken": self.end["taken"] - back, "offset": self.end["offset"] - back} if back else self.end


@dataclass(frozen=True)
class OpaqueBatch:
    """Batch whose indices only the dataset can interpret, because some are not ints or are out of range."""

    indices: Any
    end: Position | None
    share: BatchShare | None = None
    """Share of this rank in the whole batch, if this is a slice; else ``None``."""

    def behind(self, batch: int) -> Position | None:
        """Return the position after the batch. ``None``: the current position of the order."""
        return self.end


def index_lists(span: IndexSpan | OpaqueBatch) -> Iterator[tuple[IndexSpan | OpaqueBatch, int, Any]]:
    """Yield (span, number of the batch in the span, indices) of each batch."""
    if isinstance(span, OpaqueBatch):
        yield span, 1, span.indices
        return
    for number in range(span.batches):
        begin = number * span.count
        if span.indices is None:
            yield span, number + 1, list(range(span.first + begin, span.first + begin + span.count))
        else:
            yield span, number + 1, span.indices[begin : begin + span.count].tolist()


class Order(Protocol):
    """Order of the batches of one epoch."""

    def next_span(self, *, asked: bool) -> IndexSpan | OpaqueBatch | None:
        """Return the next batches: at least one, and all that are already drawn.

        Args:
            asked: True if the user requests the next batch now. The result is then ``None`` only after the last batch.
                If False, nothing is drawn that other code could observe. The result may then be ``None`` although
                batches are left.
        """

    def position(self) -> Position:
        """Return the position after the batches that were returned."""

    def has_drawn_since(self, position: Position) -> bool:
        """Return True if a generator has been used to draw batches after ``position``."""

    def completed(self, position: Position) -> Position:
        """Return ``position`` in the form to save, completed with the draws that followed."""


def why_not_ordered(loader: DataLoader) -> str | None:
    """Return why no :class:`Order` can replace the samplers of ``loader``; ``None`` if one can."""
    if loader.batch_sampler is None:
        return "batch_size=None: samples are not batched"
    if loader.num_workers > 0 and loader.worker_init_fn is not None:
        return "worker_init_fn runs in worker processes only"
    return None


_RANDINTS = 32
"""Number of indices that a RandomSampler with replacement draws at once."""

_Block = Tensor | range
_Draw = Callable[[int, torch.Generator | None], "_Block | None"]
"""Function of a block's number and a generator. It returns indices, int64 ``[n]``; ``None`` after the last block."""


class Blocks:
    """Indices of an epoch in blocks, each drawn on request.

    Args:
        draw: makes the blocks.
        generator: returns the generator, when the first block is drawn. ``None`` if blocks need no random numbers.
        is_users: True if the generator belongs to the user, who can observe the draws.
        length: length of each block except the last; ``None`` if there are only one or a few blocks.
    """

    def __init__(
        self,
        draw: _Draw,
        generator: Callable[[], torch.Generator] | None = None,
        *,
        is_users: bool = False,
        length: int | None = None,
    ) -> None:
        self.is_users = is_users
        self.drawn = 0
        self.before_first: Tensor | None = None
        """State of the generator before it drew the first block, or the block that was drawn again."""
        self.before: Tensor | None = None
        """State of the generator before it drew the last block."""
        self._length = length
        self._draw = draw
        self._make_generator = generator
        self._generator: torch.Generator | None = None

    def next(self, wanted: int) -> _Block | None:
        """Return the next block; ``None`` after the last one.

        Args:
            wanted: number of indices that are still needed. The block that completes this number sets ``before``.
        """
        if self._generator is None and self._make_generator is not None:
            self._generator = self._make_generator()
        before = None
        if self._generator is not None and (self.drawn == 0 or self._length is None or self._length >= wanted):
            before = self._generator.get_state()
        block = self._draw(self.drawn, self._generator)
        if block is not None:
            self.before_first = before if self.drawn == 0 else self.before_first
            self.drawn, self.before = self.drawn + 1, before
        return block

    def again(self, number: int, before: Tensor | None) -> _Block:
        """Draw block ``number`` again, from a generator in the state ``before``."""
        if before is not None:
            assert self._make_generator is not None
            # Any other generator ends with the epoch, or is torch's default one, which the first run has advanced.
            self._generator = self._make_generator() if self.is_users else torch.Generator()
            self._generator.set_state(before)
        self.drawn = number
        block = self.next(0)
        assert block is not None
        self.before_first = self.before
        return block


def blocks_of(sampler: Any, samples: int | None) -> Blocks | None:
    """Return the indices of an epoch of a sampler.

    Args:
        sampler: the sampler.
        samples: number of samples in the dataset. With ``None`` indices are not checked, and those of a
            ``SubsetRandomSampler`` are positions in its ``indices``.

    Returns:
        The blocks. ``None`` unless the sampler is torch's own, draws on the host, and has only indices of the dataset.
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
        return Blocks(draw, lambda: generator or torch.default_generator, is_users=is_users)
    if type(sampler) is SequentialSampler and len(sampler.data_source) <= most:
        return Blocks(_once(lambda _: range(len(sampler))))
    if type(sampler) is RandomSampler and len(sampler.data_source) <= most:
        length = _RANDINTS if sampler.replacement else None
        return Blocks(_random_block(sampler), lambda: generator or _seeded(), is_users=is_users, length=length)
    if type(sampler) is WeightedRandomSampler and len(sampler.weights) <= most:
        return Blocks(_weighted(sampler), lambda: generator or torch.default_generator, is_users=is_users)
    if type(sampler) is DistributedSampler and len(sampler.dataset) <= most:  # type: ignore[arg-type]
        return Blocks(_share(sampler), lambda: torch.Generator().manual_seed(sampler.seed + sampler.epoch))
    return None


def as_indices(indices: Sequence[int], samples: int) -> Tensor | None:
    """Return indices as int64 ``[n]``, counted from the front; ``None`` if one is not an int or is out of range."""
    if not isinstance(indices, (Tensor, np.ndarray, range)) and not all(map(is_int, indices)):
        return None
    found = torch.as_tensor(indices) if len(indices) else torch.empty(0, dtype=torch.int64)
    if found.dim() != 1 or found.dtype in (torch.bool, torch.uint64) or found.dtype.is_floating_point:
        return None
    found = found.to(torch.int64)
    if found.numel() and not (-samples <= int(found.min()) and int(found.max()) < samples):
        return None
    return torch.where(found < 0, found + samples, found)


def is_int(index: Any) -> bool:
    """Return True if ``index`` is a plain integer of Python or NumPy."""
    return type(index) is int or isinstance(index, np.integer)


class RecordedOrder:
    """Order of torch's samplers, drawn in whole blocks of indices at the same moments as torch.

    Raises:
        ValueError: ``start`` was saved by an order of another kind.
    """

    def __init__(self, batch_sampler: BatchSampler, blocks: Blocks, start: Position | None) -> None:
        sampler: Any = batch_sampler.sampler
        self._size = batch_sampler.batch_size
        self._drop_last = batch_sampler.drop_last
        self._blocks = blocks
        # A RandomSampler draws later blocks in mid-epoch. These draws are visible if the generator is the user's.
        self._is_seen = type(sampler) is RandomSampler and blocks.is_users
        self._taken = 0
        self._drawn = 0
        self._left: _Block = range(0)  # drawn, but not taken; after a batch, all are from the last block
        self._last_block = 0
        if start is not None and "block" not in start:
            raise ValueError("the state was saved where the sampler had to be asked for its batches")
        if start is not None and start["block"] >= 0:
            block = blocks.again(start["block"], start["before"])
            self._left, self._last_block = block[start["offset"] :], len(block)
            self._taken = start["taken"]
            self._drawn = self._taken + len(self._left)

    def next_span(self, *, asked: bool) -> IndexSpan | None:
        if asked or (self._drawn and not self._is_seen):
            self.draw()
        count = min(self._size, self._drawn - self._taken)
        if count < self._size and (not asked or self._drop_last or count == 0):
            return None
        batches = len(self._left) // count
        indices = self._left[: batches * count] if isinstance(self._left, Tensor) else None
        first = self._taken
        self._left = self._left[batches * count :]
        self._taken += batches * count
        return IndexSpan(indices, first, count, batches, self.position())

    def draw(self) -> None:
        """Draw the indices of the next batch, unless they are already drawn."""
        end = self._taken + self._size
        if self._drawn < end:
            with serial():
                self._draw(end)

    def _draw(self, end: int) -> None:
        parts = [self._left]
        while self._drawn < end and (block := self._blocks.next(end - self._drawn)) is not None:
            parts.append(block)
            self._drawn += len(block)
            self._last_block = len(block)
        parts = [part for part in parts if len(part)]
        if len(parts) == 1:
            self._left = parts[0]
        elif parts:
            self._left = torch.cat(parts)  # type: ignore[arg-type]  # a range is the only block of an epoch

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

    def completed(self, position: Position) -> Position:
        if position["block"] >= 0 or self._blocks.drawn == 0:
            return position
        return position | {"block": 0, "offset": 0, "before": self._blocks.before_first}


def _once(draw: Callable[[Any], _Block]) -> _Draw:
    """Return the draw of an epoch that has one block."""
    return lambda number, generator: draw(generator) if number == 0 else None


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def _random_block(sampler: RandomSampler) -> _Draw:
    n = len(sampler.data_source)
    size = _RANDINTS if sampler.replacement else n
    whole = sampler.num_samples // size

    def draw(number: int, generator: torch.Generator | None) -> Tensor | None:
        # torch reads the size of the last block when it draws this block, so a dataset that has grown has one.
        rest = sampler.num_samples % size
        # torch draws one more block than are whole, even if no index of this block is used. With a generator that the
        # sampler has made, no other code can observe this draw.
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
    """Return the draw of the indices of one rank.

    All ranks shuffle alike, and cut or repeat the order to a multiple of the number of ranks.
    """

    def draw(generator: Any) -> Tensor:
        n = len(sampler.dataset)  # type: ignore[arg-type]
        order = torch.randperm(n, generator=generator) if sampler.shuffle else torch.arange(n)
        padded = order.repeat(-(-sampler.total_size // max(n, 1)))
        return padded[sampler.rank : sampler.total_size : sampler.num_replicas].contiguous()

    return _once(draw)

"""Order of the samples in an epoch: batches of indices, and the position among them.

A position is the states of the generators at the start of the epoch, and the number of batches. To resume, the samplers
draw these batches of indices again, and the batches are dropped. No sample is loaded for them.

``Order`` draws at the same moments as torch (torch/utils/data/dataloader.py, sampler.py), so that every generator ends
an epoch in the same state:

1. ``iter(loader)`` calls ``iter(batch_sampler)``. Then it draws one int64, the base seed, from ``loader.generator``, or
   from the default generator if ``loader.generator`` is ``None``.
2. When a batch needs an index that has not been drawn, its sampler draws the next block of indices. A partial batch
   has requested one more index than it has.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

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

from flatout.core.random_state import RandomState
from flatout.core.torch_state import serial
from flatout.data.loaders import SEEDED_FROM, SLICED_FROM, TORCHS_SAMPLERS, clone_loader
from flatout.distributed.agreement import Agreement

Position = dict[str, Any]
"""Position in an epoch, made of tensors, numbers, strings, lists, dicts, and the contents of a sampler's state."""


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
class Run:
    """Consecutive batches of indices.

    Attributes:
        indices: int64 ``[batches * count]`` or a range; with ``count=None`` one batch, as its sampler yielded it.
        count: samples in each batch. None if only the dataset can interpret the indices.
        batches: number of batches.
        first: number of batches in the epoch before this run.
        last: copy of the batch that a sampler of the user yielded, on all ranks together.
        sampler: state of the sampler after the batch; None if the sampler has no ``state_dict``.
        was_last: True if the sampler has no more indices.
        share: share of this rank in each batch, if each batch is a slice; else None.
    """

    indices: Any
    count: int | None = None
    batches: int = 1
    first: int = 0
    last: Any = None
    sampler: Any = None
    was_last: bool = False
    share: BatchShare | None = None

    def after(self, batches: int) -> Run:
        """Return the run without its first batches."""
        if batches == 0:
            return self
        assert self.count is not None
        indices = self.indices[batches * self.count :]
        return replace(self, indices=indices, batches=self.batches - batches, first=self.first + batches)

    def numbered(self) -> Iterator[tuple[Run, int, Any]]:
        """Yield (run, number from 1, indices for a dataset) of each batch."""
        if self.count is None:
            yield self, 1, self.indices
            return
        for number in range(self.batches):
            batch = self.indices[number * self.count : (number + 1) * self.count]
            yield self, number + 1, list(batch) if isinstance(batch, range) else batch.tolist()


def slice_of(samples: int, rank: int, ranks: int) -> tuple[slice, BatchShare]:
    """Return the samples of one rank in a batch, and the share of this rank.

    The slices of all ranks are contiguous and in order. Their sizes differ by at most one, and the first ranks have the
    larger slices. A rank without a sample gets the first sample as a stand-in, because each rank must take part in the
    step.

    Args:
        samples: number of samples in the batch.
        rank: number of the rank, from 0.
        ranks: number of ranks.
    """
    size, larger = divmod(samples, ranks)
    begin = rank * size + min(rank, larger)
    own = size + (rank < larger)
    return slice(begin, begin + own) if own else slice(0, 1), BatchShare(own, samples)


class SlicedBatches:
    """Batch sampler that yields this rank's slices of the batches of another sampler.

    A plain iteration draws the order from the generators of this process. :class:`Order` has the order of rank 0.

    Args:
        sampler: the batch sampler of the user.
        ranks: all ranks.
    """

    def __init__(self, sampler: Any, ranks: Agreement) -> None:
        self.sampler = sampler
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        for batch in self.sampler:
            yield self.own_run(Run(batch)).indices

    def __len__(self) -> int:
        return len(self.sampler)

    def own_run(self, run: Run) -> Run:
        """Return this rank's slices of whole batches."""
        rank, ranks = self.ranks.rank, self.ranks.size
        if run.count is None:
            indices = run.indices if hasattr(run.indices, "__len__") else list(run.indices)
            part, share = slice_of(len(indices), rank, ranks)
            return replace(run, indices=indices[part], share=share)
        part, share = slice_of(run.count, rank, ranks)
        places = (torch.arange(run.batches)[:, None] * run.count + torch.arange(part.start, part.stop)).flatten()
        chosen = run.indices[places] if isinstance(run.indices, Tensor) else places + run.indices.start
        return replace(run, indices=chosen, count=part.stop - part.start, share=share)

    @staticmethod
    def of(loader: DataLoader[Any], ranks: Agreement) -> DataLoader[Any]:
        """Return a loader of samples whose batches are this rank's slices of the batches of ``loader``."""
        # With in_order=False, ranks could take slices of different batches in the same step.
        made = clone_loader(loader, batch_sampler=SlicedBatches(loader.batch_sampler, ranks), in_order=True)
        vars(made)[SLICED_FROM] = loader
        if hasattr(loader, SEEDED_FROM):
            vars(made)[SEEDED_FROM] = SlicedBatches.of(getattr(loader, SEEDED_FROM), ranks)
        return made

    def slice_too(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return another loader of samples, sliced for the same ranks."""
        return SlicedBatches.of(loader, self.ranks)


def slices_of(loader: Any) -> SlicedBatches | None:
    """Return the batch sampler of a sliced loader of samples; None for another loader."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler if type(batch_sampler) is SlicedBatches else None


class SharedDraws:
    """Draws of a sampler in one epoch, equal on all ranks.

    The epoch begins with the states of rank 0's generators. During the epoch, the sampler draws from separate states of
    the global generators. So the models of the ranks may draw any number of random numbers. After each draw, the global
    generators get back the states that the training left. On rank 0, a generator that only the sampler uses keeps the
    state after the draw, as in one process.

    Construction is a collective. A draw takes a broadcast longer than in one process.

    Args:
        ranks: all ranks.
        held: generators of the sampler and the loader. They are set to rank 0's states.
    """

    def __init__(self, ranks: Agreement, held: RandomState) -> None:
        own = RandomState.of_host()
        states, of_held = ranks.first((own.states(), held.states()))
        held.write(of_held)
        self._states = own.given(states)
        self._is_first_rank = ranks.rank == 0
        self._is_drawing = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context for the sampler's draws. The context may be entered again inside the block."""
        if self._is_drawing:
            yield
            return
        own = self._states.reread()
        self._states.restore()
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
            before, self._states = self._states, self._states.reread()
            own.restore()
            if self._is_first_rank:
                before.advance(self._states)

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """Return a context for repeated draws. Later draws continue from their states."""
        yield
        self._states = self._states.reread()


class Order:
    """Batches of indices of one epoch, each drawn when it is requested, and this rank's slices of them.

    As an iterator, an order yields the indices of each batch for a ``DataLoader``, and keeps its place in ``given``.

    A sampler that has ``state_dict`` and ``load_state_dict``, or whose iterator has them, saves its position itself. To
    resume, any other sampler draws the epoch again, up to the last batch that was drawn. A sampler of the user may draw
    from a generator that other code uses in mid-epoch. If it then draws other batches, resuming is an error. If it
    draws the same, this generator may have another state than in an uninterrupted run.

    Args:
        loader: the loader of whole batches.
        samples: number of samples in the dataset, if rows of tensors are gathered. With None indices have the types
            that the sampler gives them.
        held: generators that the sampler holds.
        draws: random numbers that are equal on all ranks; None in one process.
        slices: batch sampler of slices; None in one process.
        start: position to resume from; None: the beginning of a new epoch.

    Attributes:
        begun: run of no batch, which has the place where the order begins.
        given: runs of the batches that were yielded, each with the number of its batch, counted from 1.
        passed: number of batches that were removed from ``given``.
        is_torchs: True for one of torch's samplers, whose indices are drawn in blocks.
        is_free: True if no other code can observe a draw ahead of time.
        worker_seed: seed of the worker processes of this epoch.

    Raises:
        ValueError: the sampler now draws other batches before ``start``.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        samples: int | None,
        *,
        held: list[Any],
        draws: SharedDraws | None,
        slices: SlicedBatches | None,
        start: Position | None,
    ) -> None:
        self._sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._samples, self._held, self._draws, self._slices = samples, held, draws, slices
        self.given: deque[tuple[Run, int]] = deque()
        self.passed = 0
        self.is_torchs = self.is_free = False
        self.worker_seed = 0
        # States of the generators at the beginning of the epoch and before its first batch.
        self._states: list[Any] = []
        self._batches: Any = None  # iterator of a sampler of the user
        self._drawn = 0
        self._is_exhausted = False
        self._last: Any = None  # last batch that was drawn
        self._left: deque[Run] = deque()  # drawn, but not requested yet
        self._lists: Iterator[tuple[Run, int, Any]] = iter(())
        self._version_1 = start and start.get("version_1")
        self._epoch = _epoch_of(self._sampler)
        if start is None:
            self._states.append(self._generators())
            self._runs = self._iterate()
            self.begun = Run((), batches=0, sampler=self._state())
        elif "sampler" in start:
            self._load(start)
        else:
            self._draw_again(start)

    def _generators(self) -> RandomState:
        """Return the current states of all generators from which the sampler may draw."""
        is_torchs = type(decisive(self._sampler)) in TORCHS_SAMPLERS
        return RandomState.of_torch(self._held) if is_torchs else RandomState.of(self._held)

    def _iterate(self) -> Iterator[Run]:
        order = self._sampler
        if self._version_1 is not None:
            return map(_single, _rest_of_version_1(order, self._version_1))
        if type(order) is BatchSampler and (blocks := _blocks(order.sampler, self._samples)) is not None:
            self.is_torchs = True
            # What a RandomSampler draws last depends on the size of the dataset at that time.
            self.is_free = type(order.sampler) is not RandomSampler
            return _in_batches(blocks, order.batch_size, order.drop_last)
        self._batches = iter(order)
        return map(_single, self._batches)

    def next(self, *, asked: bool = True) -> Run | None:
        """Return the next batches: at least one, and all that are already drawn. None after the last batch.

        Args:
            asked: True if the user requests the next batch now. If False, nothing is drawn that other code could
                observe. The result may then be None although batches are left.
        """
        if not (asked or self.is_free):
            return None
        if not self._left:
            self.draw()
        run = self._left.popleft() if self._left else None
        return run if run is None or self._slices is None else self._slices.own_run(run)

    def draw(self) -> None:
        """Draw the next batches, and keep them for ``next``."""
        if self._is_exhausted:
            return
        with nullcontext() if self._draws is None else self._draws.drawing():
            if len(self._states) == 1:
                self._states.append(self._generators())
            run = next(self._runs, None)
            if run is None:
                self._is_exhausted = True
            else:
                self._left.append(self._placed(run))

    def _placed(self, run: Run) -> Run:
        first, self._drawn, self._last = self._drawn, self._drawn + run.batches, run.last
        if self._samples is not None and type(run.indices) in (list, tuple) and run.indices:
            found = as_indices(run.indices, self._samples)
            run = run if found is None else replace(run, indices=found, count=len(found))
        if (state := self._state()) is None:
            return replace(run, first=first)
        order = self._sampler
        was_last = type(order) is BatchSampler and len(run.last) < order.batch_size
        return replace(run, first=first, sampler=state, was_last=was_last)

    def __iter__(self) -> Order:
        return self

    def __next__(self) -> Any:
        found = next(self._lists, None)
        if found is None:
            run = self.next()
            if run is None:
                raise StopIteration
            self._lists = run.numbered()
            found = next(self._lists)
        run, number, indices = found
        self.given.append((run, number))
        return indices

    def position(self, run: Run, number: int) -> Position:
        """Return the position after a batch of a run, counted from 1."""
        taken = run.first + number
        if run.sampler is not None:
            return {"taken": taken, "sampler": run.sampler, "was_last": run.was_last}
        states = [state.states() if isinstance(state, RandomState) else state for state in self._states]
        position = {"taken": taken, "drawn": self._drawn, "is_exhausted": self._is_exhausted, "generators": states}
        position |= {"last": _plain(run.last), "last_drawn": _plain(self._last), "epoch": self._epoch}
        return position if self._version_1 is None else position | {"version_1": self._version_1}

    def _stateful(self) -> Any:
        """Return the part of the sampler that can save and restore its position; None if no part can."""
        parts = (self._sampler, getattr(self._sampler, "sampler", None), self._batches)
        return next((part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")), None)

    def _state(self) -> Any:
        stateful = self._stateful()
        return None if stateful is None else copy.deepcopy(stateful.state_dict())

    def _load(self, start: Position) -> None:
        state, was_last = start["sampler"], start["was_last"]
        self._drawn = start["taken"]
        self.begun = Run((), batches=0, first=self._drawn, sampler=state, was_last=was_last)
        with RandomState.capture().restored():
            stateful = self._stateful()
            if stateful is not None:
                stateful.load_state_dict(copy.deepcopy(state))
            self._runs = self._iterate()
            if stateful is None:
                self._batches.load_state_dict(copy.deepcopy(state))
        if was_last:
            self._runs = iter(())

    def _draw_again(self, start: Position) -> None:
        taken, last = start["taken"], start.get("last")
        self._states = list(start["generators"])
        self.begun = Run((), batches=0, first=taken, last=last)
        if start.get("epoch") is not None and self._epoch is not None:
            self._epoch = start["epoch"]
            decisive(self._sampler).set_epoch(self._epoch)
        with self._drawing_again():
            if self._states:
                self._generators().write(self._states[0])
            else:  # of version 1, which saved none
                self._states.append(self._generators())
            self._runs = self._iterate()
            if len(self._states) == 2:
                self._generators().write(self._states[1])
            found = None
            while self._drawn < start["drawn"] and (run := next(self._runs, None)) is not None:
                run = self._placed(run)
                if run.first + run.batches > taken:
                    self._left.append(run.after(max(taken - run.first, 0)))
                elif run.first + run.batches == taken:
                    found = run.last
            if start.get("is_exhausted"):
                self._is_exhausted = next(self._runs, None) is None
        for drawn, before in ((found, last), (self._last, start.get("last_drawn"))):
            if before is not None and _plain(drawn) != before:
                raise ValueError(
                    f"{type(self._sampler).__name__} drew other batches than before. To resume in mid-epoch, it needs "
                    "state_dict() and load_state_dict(), or must draw from generators that it holds"
                )

    def _drawing_again(self) -> AbstractContextManager[None]:
        return RandomState.capture().restored() if self._draws is None else self._draws.drawing_again()


def decisive(sampler: Any) -> Any:
    """Return the sampler that decides the order of samples: the user's sampler or batch sampler."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _epoch_of(sampler: Any) -> int | None:
    """Return the number of the epoch that was passed to ``set_epoch`` of a sampler; None without such a number."""
    epoch = getattr(decisive(sampler), "epoch", None)
    return epoch if type(epoch) is int and hasattr(decisive(sampler), "set_epoch") else None


def _single(batch: Any) -> Run:
    batch = list(batch) if isinstance(batch, list) else batch  # some samplers reuse a list
    return Run(batch, last=batch)


def _plain(batch: Any) -> list[int] | None:
    """Return the indices of a batch if all are ints, else None."""
    batch = [batch] if is_int(batch) else batch
    if isinstance(batch, (list, tuple)) and all(map(is_int, batch)):
        return [int(index) for index in batch]
    return None


def is_int(index: Any) -> bool:
    """Return True if ``index`` is a plain integer of Python or NumPy."""
    return type(index) is int or isinstance(index, np.integer)


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


_RANDINTS = 32
"""Number of indices that a RandomSampler with replacement draws at once."""
_SOURCES = {
    SequentialSampler: "data_source",
    RandomSampler: "data_source",
    WeightedRandomSampler: "weights",
    DistributedSampler: "dataset",
}
"""Attribute of torch's samplers with the samples to which indices refer."""


def _blocks(sampler: Any, samples: int | None) -> Iterator[Any] | None:
    """Return the indices of torch's own samplers in the blocks in which they are drawn. None for other samplers.

    Without lists of single indices, an epoch of a large dataset starts many times faster. Indices of a
    ``SubsetRandomSampler`` have the user's types, so ``samples`` is required for its blocks.

    Args:
        sampler: the sampler. It must draw on the host, and have only indices of the dataset.
        samples: number of samples in the dataset; None if it is not known.
    """
    kind, generator = type(sampler), getattr(sampler, "generator", None)
    if generator is not None and generator.device.type != "cpu":
        return None
    if kind is SubsetRandomSampler and samples is not None:
        with serial():
            indices = as_indices(sampler.indices, samples)
        return None if indices is None else _drawn(sampler, indices)
    if kind not in _SOURCES or len(getattr(sampler, _SOURCES[kind])) > (sys.maxsize if samples is None else samples):
        return None
    return _drawn(sampler)


def _drawn(sampler: Any, indices: Any = None) -> Iterator[Any]:
    """Yield blocks of indices, int64 ``[n]`` or ranges, drawn as by the ``__iter__`` of the sampler."""
    kind, generator = type(sampler), getattr(sampler, "generator", None)
    if kind is RandomSampler:
        yield from _drawn_at_random(sampler)
    elif kind is SequentialSampler:
        yield range(len(sampler))
    elif kind is SubsetRandomSampler:
        yield indices[torch.randperm(len(indices), generator=generator)]
    elif kind is WeightedRandomSampler:
        yield torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator)
    else:  # all ranks shuffle alike, and cut or repeat the order to a multiple of the number of ranks
        n = len(sampler.dataset)
        generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(n, generator=generator) if sampler.shuffle else torch.arange(n)
        padded = order.repeat(-(-sampler.total_size // max(n, 1)))
        yield padded[sampler.rank : sampler.total_size : sampler.num_replicas].contiguous()


def _drawn_at_random(sampler: RandomSampler) -> Iterator[Tensor]:
    n = len(sampler.data_source)
    size = _RANDINTS if sampler.replacement else n
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))

    def draw(count: int) -> Tensor:
        if sampler.replacement:
            return torch.randint(n, (count,), dtype=torch.int64, generator=generator)
        return torch.randperm(n, generator=generator)[:count]

    for _ in range(sampler.num_samples // size):
        yield draw(size)
    rest = sampler.num_samples % size  # torch reads this size here, so a dataset that has grown has such a block
    # torch draws this block even if it is empty. Without a generator of the user, no other code can observe the draw.
    if rest or sampler.generator is not None:
        yield draw(rest)


def _in_batches(blocks: Iterator[Any], size: int, drop_last: bool) -> Iterator[Run]:
    """Yield all full batches that are drawn, as soon as there is one, and at last the partial one."""
    left: Any = ()
    while True:
        with serial():
            block = next(blocks, None)
            if block is None:
                break
            left = torch.cat([left, block]) if len(left) else block
        if full := len(left) // size:
            yield Run(left[: full * size], size, full)
            left = left[full * size :]
    if len(left) and not drop_last:
        yield Run(left, len(left))


def _rest_of_version_1(order: Any, old: Position) -> Iterator[Any]:
    """Return the rest of an epoch of torch's samplers, from a position that version 1 saved.

    Such a position has the number of the last block that was drawn, the number of its indices that were taken, and the
    state of the generator before it drew this block. The block is drawn at once.
    """
    is_batched = type(order) is BatchSampler
    sampler: Any = copy.copy(decisive(order))
    if isinstance(sampler, DistributedSampler):
        sampler.epoch = torch.Generator().set_state(old["before"]).initial_seed() - sampler.seed
    elif old["before"] is not None:
        sampler.generator = torch.Generator() if sampler.generator is None else sampler.generator
        sampler.generator.set_state(old["before"])
        if isinstance(sampler, RandomSampler):
            size = _RANDINTS if sampler.replacement else len(sampler.data_source)
            sampler._num_samples = sampler.num_samples - old["block"] * size
    indices = iter(sampler)
    first = list(itertools.islice(indices, max(old["offset"], 1)))[old["offset"] :]
    rest = itertools.chain(first, indices)
    return iter(BatchSampler(rest, order.batch_size, order.drop_last)) if is_batched else rest


def why_not_ordered(loader: DataLoader[Any]) -> str | None:
    """Return why no :class:`Order` can replace the samplers of ``loader``; ``None`` if one can."""
    if loader.batch_sampler is None:
        return "batch_size=None: samples are not batched"
    if loader.num_workers > 0 and loader.worker_init_fn is not None:
        return "worker_init_fn runs in worker processes only"
    return None

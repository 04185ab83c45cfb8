"""``cache_in_memory``: decode a deterministic dataset once, then serve it from memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, default_collate

from flatout.data.batch import map_tensors, tensors_of
from flatout.data.gather import why_not_column
from flatout.data.generators import RandomState
from flatout.data.machine import available_memory
from flatout.data.memory import InMemoryLoader, why_not_collated
from flatout.data.order import why_not_ordered

_CHUNK = 32  # samples asked for at a time where the dataset has __getitems__
_SECOND_LOOK = 16  # samples evaluated twice


class NotCacheable(ValueError):
    """A loader that cannot be served from memory; the message says why."""


def cache_in_memory(
    loader: DataLoader, *, byte_budget: int | None = None, depth: int = 2, threads: int | None = None
) -> InMemoryLoader:
    """Evaluate every sample of a deterministic map-style dataset once, and serve batches from memory.

    The batches equal those of ``loader`` with ``num_workers=0``, in its order: what default collate makes of
    the samples (ints to int64, floats to float64, tuples to lists, NumPy arrays to tensors). Samples are
    evaluated in order on the calling thread. A dataset is taken for random, and refused, when evaluating it
    moves a global generator of torch, ``random`` or NumPy, or a generator found in its attributes, or when a
    second evaluation of 16 samples spread over it gives other bits; randomness that hides from all of these
    is not noticed.

    Args:
        loader: default collate, torch's random or sequential sampler, any map-style dataset.
        byte_budget: bytes that the samples may take; default: a quarter of the memory that is available.
        depth: batches gathered ahead.
        threads: gathering threads, as in :class:`InMemoryLoader`.

    Returns:
        A loader that does not touch the dataset any more.

    Raises:
        NotCacheable: the message says why. Generators are as before, here as on success.
    """
    reason = why_not_collated(loader) or _why_not_dataset(loader.dataset) or why_not_ordered(loader)
    if reason is not None:
        raise NotCacheable(reason)
    dataset: Any = loader.dataset
    budget = available_memory() // 4 if byte_budget is None else byte_budget
    state = RandomState.capture(dataset)
    with state.restored():
        table = _Table(len(dataset), budget)
        for index, sample in enumerate(_samples(dataset, range(len(dataset)))):
            table.put(index, sample)
            if index == 0:
                _refuse_moved(state)  # at once: most random datasets are random from the first sample on
        spread = sorted({round(i * (len(dataset) - 1) / (_SECOND_LOOK - 1)) for i in range(_SECOND_LOOK)})
        for index, sample in zip(spread, _samples(dataset, spread), strict=True):
            if not table.holds(index, sample):
                raise NotCacheable(f"dataset[{index}] gave two different results: the dataset is random")
        _refuse_moved(state)
    return InMemoryLoader.over(loader, table.columns, table.assemble, depth=depth, threads=threads)


def _why_not_dataset(dataset: Any) -> str | None:
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        return f"the dataset is a {type(dataset).__name__}, not map-style"
    if not hasattr(dataset, "__len__"):
        return f"the dataset, a {type(dataset).__name__}, has no length"
    if hasattr(dataset, "set_epoch"):
        return "the dataset has a set_epoch: its samples may change from epoch to epoch"
    return "the dataset is empty" if len(dataset) == 0 else None


def _refuse_moved(state: RandomState) -> None:
    moved = state.moved()
    if moved is not None:
        raise NotCacheable(f"evaluating a sample moved {moved}: the dataset is random")


def _samples(dataset: Any, indices: Any) -> Iterator[Any]:
    """``dataset[i]`` for each index, fetched the way DataLoader does."""
    batched = getattr(dataset, "__getitems__", None)
    size = _CHUNK if batched else 1
    for start in range(0, len(indices), size):
        chunk = list(indices[start : start + size])
        try:
            samples = batched(chunk) if batched else [dataset[index] for index in chunk]
        except Exception as error:  # the user's own code: it will raise again where the user looks for it
            raise NotCacheable(f"dataset[{chunk[0]}..{chunk[-1]}] raised {type(error).__name__}: {error}") from error
        if not isinstance(samples, (list, tuple)) or len(samples) != len(chunk):
            raise NotCacheable(f"__getitems__ does not return a list of {len(chunk)} samples for as many indices")
        yield from samples


def _signature(sample: Any) -> Any:
    """Types of a sample's containers and leaves: what decides how default collate stacks it."""
    kind = type(sample)
    if kind in (dict, OrderedDict):
        return kind, tuple((key, _signature(value)) for key, value in sample.items())
    if kind in (list, tuple) or (isinstance(sample, tuple) and hasattr(sample, "_fields")):
        return kind, tuple(_signature(value) for value in sample)
    if kind in (str, bytes):
        raise NotCacheable("samples hold strings")
    if kind in (Tensor, np.ndarray, np.memmap, int, float, bool) or isinstance(sample, (np.number, np.bool_)):
        return kind
    raise NotCacheable(f"samples hold a {kind.__name__}")


class _Table:
    """Samples, stacked leaf by leaf."""

    def __init__(self, samples: int, byte_budget: int) -> None:
        self._samples = samples
        self._byte_budget = byte_budget
        self._signature: Any = None
        self._skeleton: Any = None
        self.columns: list[Tensor] = []

    def put(self, index: int, sample: Any) -> None:
        """Store ``sample`` as row ``index``."""
        signature = _signature(sample)
        try:
            row = default_collate([sample])  # its conversions are the definition of what a batch holds
        except (TypeError, RuntimeError, ValueError, OverflowError) as error:
            raise NotCacheable(f"dataset[{index}] cannot be collated: {error}") from error
        leaves = tensors_of(row)
        if not self.columns:
            self._allocate(row, leaves)
            self._signature = signature
        if signature != self._signature:
            raise NotCacheable(f"dataset[{index}] is made of other types than dataset[0]")
        for column, leaf in zip(self.columns, leaves, strict=True):
            if leaf.shape[1:] != column.shape[1:] or leaf.dtype != column.dtype:
                raise NotCacheable(
                    f"dataset[{index}] holds {leaf.dtype} {tuple(leaf.shape[1:])} where dataset[0] holds "
                    f"{column.dtype} {tuple(column.shape[1:])}: samples differ in shape"
                )
            if leaf.requires_grad:
                raise NotCacheable(f"dataset[{index}] holds a tensor that requires grad")
            column[index] = leaf[0]

    def _allocate(self, row: Any, leaves: list[Tensor]) -> None:
        if not leaves:
            raise NotCacheable("samples hold no tensor")
        for leaf in leaves:
            reason = why_not_column(leaf)
            if reason is not None:
                raise NotCacheable(f"samples hold {reason}")
        needed = self._samples * sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        if needed > self._byte_budget:
            raise NotCacheable(f"the samples take {needed:,} bytes, the budget is {self._byte_budget:,}")
        self.columns = [torch.empty((self._samples, *leaf.shape[1:]), dtype=leaf.dtype) for leaf in leaves]
        self._skeleton = map_tensors(lambda _: torch.empty(0), row)

    def holds(self, index: int, sample: Any) -> bool:
        """Whether row ``index`` is ``sample``, bit for bit."""
        if _signature(sample) != self._signature:
            return False
        leaves = tensors_of(default_collate([sample]))
        return all(_same_bits(column[index], leaf[0]) for column, leaf in zip(self.columns, leaves, strict=True))

    def assemble(self, tensors: list[Tensor]) -> Any:
        """A batch's columns in the containers of the samples."""
        left = iter(tensors)
        return map_tensors(lambda _: next(left), self._skeleton)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))  # NaN equals NaN

"""Properties of a user's loader, and clones with other settings."""

from __future__ import annotations

import collections
import inspect
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.core.batches import cloned, tensors_of
from flatout.core.contents import Contents
from flatout.core.effects import Unrepeatable, why_not_repeated
from flatout.core.random_state import RandomState
from flatout.core.reachable import reachable
from flatout.core.saved import Saved
from flatout.core.snapshot import Snapshot
from flatout.data.forwarding import Forwarding
from flatout.data.loader_class import base_of, is_plain, share_iterators, why_not_plain, with_base

_COUNTERS = (int, float, list, dict, set, collections.deque)
"""Types of values that may count samples."""
TORCHS_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_REWINDABLE_SAMPLERS = (*TORCHS_SAMPLERS, list, tuple, range)
_STATELESS = (int, float, str, torch.Generator, type(None))
"""Types of a sampler's attributes that a rewind restores, or that no epoch changes."""
_SEEDS_ONCE = "seeds_workers_once"
"""Name of the attribute of a clone that is True if the original loader has persistent workers."""
SEEDED_FROM = "seeded_from"
"""Attribute of a loader with a seed for each sample: the loader from which it was made."""
UNKNOWN_LENGTH = 1000
"""Batches per epoch that are assumed if a loader's length is unknown."""
FEWEST_TRIAL_BATCHES, TRIAL_BATCHES = 2, 4
"""Numbers of batches that trials repeat: for slow loaders, and for all others. The batches stay on the device."""
SLICED_FROM = "sliced_from"
"""Attribute of a sliced loader, whose batches are those of one rank. Its value is the loader of whole batches."""
RESIZED_FROM = "resized_from"
"""Attribute of a loader with another batch size: the loader from which it was made."""
_WORKERS_ONLY = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
_ENDLESS = (itertools.count, itertools.cycle, itertools.repeat)
_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "worker_init_fn",
    "generator",
    "in_order",
    *_WORKERS_ONLY,
)
_BATCHING = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def check_reiterable(loader: Any, argument: str = "loader") -> None:
    """Refuse an iterator that yields nothing in a second epoch: a generator, ``map(...)`` or ``iter(DataLoader)``.

    Iterators of other classes are accepted, because some start over in ``__iter__``, as NVIDIA DALI's do.

    Raises:
        TypeError: ``loader`` is such an iterator.
    """
    kind = type(loader)
    is_builtin = isinstance(loader, Iterator) and kind.__module__ in ("builtins", "itertools")
    if (is_builtin and kind not in _ENDLESS) or isinstance(loader, _BaseDataLoaderIter):
        raise TypeError(
            f"{argument} must be iterable more than once, got a {kind.__name__}, which is exhausted after one epoch. "
            "Pass the DataLoader or the list itself, or an object whose __iter__ starts over:\n"
            "    class Batches:\n"
            "        def __iter__(self):\n"
            "            yield from make_batches()"
        )


def reading_again(loader: Any) -> AbstractContextManager[None]:
    """Restore generators and Python state of a loader, its samplers and its dataset after the block.

    Raises:
        Unrepeatable: the loader's code is about to write a file, or to reach another process.
    """
    return Snapshot.capture([], loader=loader).repeatable()


def is_rewindable(loader: Any) -> bool:
    """Return True if another iteration of ``loader`` loses no sample.

    True for a ``DataLoader`` over a map-style dataset with torch's own samplers, and for a list or tuple of batches.
    Also true for subclasses and wrappers with such a ``base_of``, and for flatout's loaders over one of these. A
    sampler of another class is accepted if its ``__iter__`` is a generator function and its attributes are numbers or
    accepted samplers. False if this is unknown, and if ``why_not_read`` has a reason.
    """
    if type(loader) in (list, tuple):
        return True
    base = base_of(loader)
    if base is None:
        inner = getattr(loader, "loader", None) if type(loader).__module__.startswith("flatout.data.") else None
        return inner is not None and is_rewindable(inner)
    base = unsliced(getattr(base, SEEDED_FROM, base))
    if isinstance(base.dataset, (IterableDataset, MapDataPipe)):
        return False
    if not _starts_over(base.sampler if base.batch_sampler is None else base.batch_sampler, base.dataset):
        return False
    return not why_not_read(base)


def why_not_read(loader: Any) -> str:
    """Return why batches that are read out of turn would leave a trace, as a clause. Empty if no reason is seen.

    Dataset, sampler and ``collate_fn`` must reach no object that reading changes, and that cannot be put back. Such
    objects are iterators, threads, queues, databases and files that are open for writing.
    """
    base = base_of(unwrapped(loader))
    if base is None:
        return ""
    parts = [base.dataset, base.sampler, base.batch_sampler, base.collate_fn]
    return why_not_repeated(reachable(parts, with_loops=False), "reading samples")


def _starts_over(order: Any, dataset: Any) -> bool:
    """Return True if every ``iter`` of a sampler, or of a batch sampler, yields a whole epoch."""
    if type(order) in _REWINDABLE_SAMPLERS:
        return True
    if type(order) is BatchSampler:
        return _starts_over(order.sampler, dataset)
    if not inspect.isgeneratorfunction(getattr(type(order), "__iter__", None)):
        return False
    parts = (part for part in vars(order).values() if part is not dataset and not isinstance(part, _STATELESS))
    return all(type(part) is not list and _starts_over(part, dataset) for part in parts)  # a list may be shuffled


def known_length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches per epoch; None if the loader has no length, as over an ``IterableDataset``."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, OverflowError):  # OverflowError: the length exceeds 2**63
        return None


def length_of(loader: Iterable[Any]) -> int:
    """Return the number of batches per epoch; ``UNKNOWN_LENGTH`` if the loader has no length."""
    length = known_length(loader)
    return UNKNOWN_LENGTH if length is None else length


_INNER = ("loader", "_source", "_made", "_sampler_epoch")
"""Attributes of flatout's loaders that hold the objects with the rest of the position."""


def loader_position(*loaders: Any) -> Saved:
    """Return the part for positions and counters of loaders, of the loaders inside them, and of rewindable samplers."""
    parts: list[Any] = []
    left = [*loaders]
    while left:
        inner = left.pop()
        if any(inner is part for part in parts):
            continue
        if type(inner).__module__.startswith(("flatout.data.", "flatout.training.loader")):
            parts.append(inner)
            left += [getattr(inner, "__dict__", {}).get(name) for name in _INNER]
        elif is_rewindable(inner):
            parts += parts_of(base_of(inner))  # a sampler may count its epochs
    held = [vars(part) for part in parts if hasattr(part, "__dict__")]

    def write(saved: list[dict[str, Any]]) -> None:
        for attributes, values in zip(held, saved, strict=True):
            attributes.clear()
            attributes.update(values)

    return Saved(lambda: list(map(dict, held)), write)


def original_of(loader: Any) -> Any:
    """Return the user's loader, from which ``loader`` was made with another batch size, seeded samples or slices."""
    for made_from in (SEEDED_FROM, RESIZED_FROM):
        if isinstance(loader, DataLoader):
            loader = getattr(loader, made_from, loader)
    return unsliced(loader)


def unwrapped(loader: Any) -> Any:
    """Return the loader inside flatout's wrappers, such as a replay buffer."""
    while isinstance(loader, Forwarding):
        loader = loader._wrapped
    return loader


def unsliced(loader: Any) -> Any:
    """Return the loader of whole batches, of which ``loader`` yields one rank's slices; else ``loader``."""
    return getattr(loader, "__dict__", {}).get(SLICED_FROM, loader)


def set_attribute(own: Any, made: Sequence[Any], name: str, value: Any) -> None:
    """Set an attribute of the user's loader and of the loaders that were made from it.

    Args:
        own: the user's loader.
        made: loaders that were made from ``own``.
        name: the name of the attribute.
        value: the new value.

    Raises:
        ValueError: the attribute is a setting for which ``optimize`` chose another value than ``own`` has. No loader
            has changed.
        Exception: the error of a loader that refuses the value.
    """
    for loader in made:
        if name in _SETTINGS and getattr(loader, name) is not getattr(own, name):
            raise ValueError(
                f"{name} must be set before optimize(), which has chosen {getattr(loader, name)!r} for training. "
                "Set it on your own loader, and call optimize() again"
            )
    for loader in [*made, own]:
        setattr(loader, name, value)


def with_batch_size(loader: DataLoader, samples: int) -> DataLoader:
    """Return a loader with another number of samples in a batch.

    Raises:
        ValueError: this loader cannot have another batch size. The message says why.
    """
    reason = why_not_resized(loader)
    if reason:
        raise ValueError(reason)
    whole = unsliced(loader)
    resized = clone_loader(whole, batch_size=samples)
    vars(resized)[RESIZED_FROM] = original_of(loader)
    return resized if whole is loader else loader.batch_sampler.slice_too(resized)  # type: ignore[union-attr]


def why_not_resized(loader: Any) -> str:
    """Return why a loader cannot have another batch size; empty if it can."""
    loader = unsliced(loader)
    if not is_plain(loader):
        return why_not_plain(loader)
    if loader.batch_size is None:
        return "the loader has no batch size: it was made with a batch_sampler, or with batch_size=None"
    if not is_rewindable(loader):
        return "the loader cannot be rewound: a loader in its place would lose samples"
    return ""


def first_batches(loader: Any, count: int, seconds: float = math.inf) -> list[Any]:
    """Return copies of the first batches of a rewindable loader.

    Batches are copied because the dataset or the ``collate_fn`` may reuse their memory. The generators of the order
    advance.

    Args:
        loader: the loader.
        count: number of batches.
        seconds: time after which ``FEWEST_TRIAL_BATCHES`` are enough.
    """
    batches = loader if base_of(loader) is None else clone_loader(loader)
    end, taken = time.perf_counter() + seconds, []
    for batch in itertools.islice(batches, count):
        taken.append(cloned(batch))
        if len(taken) >= FEWEST_TRIAL_BATCHES and time.perf_counter() > end:
            break
    return taken


def clone_loader(loader: Any, **changes: Any) -> Any:
    """Return a second loader like ``loader``, with ``changes``.

    Shares dataset, samplers, generator, ``collate_fn`` and all other settings. Settings that only exist with
    worker processes are left out when there are none. Iterating the clone advances shared samplers and
    generators: capture them first. A clone with persistent workers draws the workers' seed once, any other clone draws
    a seed in every epoch. A ``Prefetcher`` over the clone draws the seed exactly when ``loader`` would, so later epochs
    have the same orders.

    Args:
        loader: a ``DataLoader``, or a subclass or wrapper with a ``base_of``. The clone of a subclass or wrapper is a
            copy with its attributes and another base. Its constructor is not called.
        changes: any argument of ``DataLoader``, such as ``num_workers=4, persistent_workers=True``.

    Raises:
        ValueError: ``loader`` has no ``base_of``, ``loader`` is made of data pipes, or a change contradicts its
        batch sampler.
    """
    base = base_of(loader)
    if base is None:
        raise ValueError(f"loader must take its batches from a torch DataLoader: {why_not_plain(loader)}")
    dataset = changes.get("dataset", base.dataset)
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        raise ValueError("loader must not be made of data pipes: a clone would share their state")
    arguments: dict[str, Any] = {name: getattr(base, name) for name in ("dataset", *_SETTINGS)}
    if base.pin_memory_device:
        arguments["pin_memory_device"] = base.pin_memory_device
    arguments |= _batching(base, changes)
    arguments |= changes
    if arguments["num_workers"] == 0:
        for name in _WORKERS_ONLY:
            if name not in changes:
                del arguments[name]
    clone = DataLoader(**arguments)
    if not changes.keys() & set(_BATCHING):
        # DataLoader would make another batch sampler, and lose the user's changes to this one.
        vars(clone)["batch_sampler"] = base.batch_sampler
    vars(clone)[_SEEDS_ONCE] = seeds_workers_once(base)
    share_iterators(base, clone)
    return with_base(loader, clone)


def seeds_workers_once(loader: DataLoader) -> bool:
    """Return True if only the first epoch draws a seed for workers, as torch does for persistent workers.

    For a clone the answer is that of the original loader, so that both draw the same random numbers.
    """
    return getattr(loader, _SEEDS_ONCE, loader.persistent_workers)


def _batching(loader: DataLoader, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that give a clone the same batches, except for ``changes``."""
    iterable = isinstance(loader.dataset, IterableDataset)
    changed = changes.keys() & set(_BATCHING)
    if loader.batch_size is None and loader.batch_sampler is not None:
        if "batch_sampler" in changes:
            return {}
        if changed - {"dataset"}:
            raise ValueError(f"{sorted(changed)} cannot be changed: the loader was made with a batch_sampler")
        return {"batch_sampler": loader.batch_sampler}
    if "batch_sampler" in changes:
        return {}
    batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not iterable and not changed & {"sampler", "shuffle"}:
        batching["sampler"] = loader.sampler
    return batching


@dataclass(frozen=True)
class Randomness:
    """Evidence that samples, or the batches made of them, are random.

    Attributes:
        reason: the evidence, in one sentence.
        is_drawn: True if the numbers are drawn from a known generator. Otherwise samples may depend on earlier ones.
    """

    reason: str
    is_drawn: bool


def randomness_of(loader: DataLoader, *, samples: int = 16, seconds: float = 1.0) -> Randomness | None:
    """Return the evidence that samples are random; ``None`` if there is none.

    Some samples, spread over the dataset, are made and collated on this thread. If this moves no generator, the same
    samples are made and collated again, and compared.

    Args:
        loader: a loader over a map-style dataset. Exceptions of its code are raised. ``reading_again`` restores it.
        samples: largest number of samples to make.
        seconds: time limit, which may reduce the number of samples.
    """
    dataset: Any = loader.dataset
    last, deadline = len(dataset) - 1, time.perf_counter() + seconds / 2
    state = RandomState.capture([dataset, loader.collate_fn])
    with reading_again(loader):
        looked_at: list[int] = []
        made: list[Any] = []
        for index in sorted({round(i * last / max(1, samples - 1)) for i in range(samples)}):
            made.append(dataset[index])
            looked_at.append(index)
            if time.perf_counter() > deadline:
                break
        collate: Any = loader.collate_fn
        is_batched = loader.batch_sampler is not None
        first = tensors_of(cloned(collate(made) if is_batched else list(map(collate, made))))
        moved, second = state.moved(), first
        if moved is None:
            made = [dataset[index] for index in looked_at]
            second = tensors_of(collate(made) if is_batched else list(map(collate, made)))
            moved = state.moved()
    if moved is not None:
        return Randomness(f"a sample draws from {moved}", is_drawn=True)
    if len(first) != len(second) or not all(map(same_bits, first, second)):
        return Randomness("a sample was made twice, and differs", is_drawn=False)
    return None


def changed_by_reading(loader: DataLoader) -> str:
    """Return what changes in a dataset when a sample is made again, or the file that is written. Empty without one.

    Only numbers and containers count, because a cache keeps its sample. Empty for a loader with worker processes, too,
    because these change their own copies of the dataset.
    """
    dataset: Any = loader.dataset
    if loader.num_workers:
        return ""
    with reading_again(loader):
        try:
            dataset[0]  # may open a file
            contents = Contents(dataset)
            dataset[0]
        except Unrepeatable as reason:
            return str(reason)
        except Exception:  # of a dataset that only worker processes can read
            return ""
        for text, before, now in contents.differences():
            if isinstance(before, _COUNTERS) and isinstance(now, _COUNTERS):
                return f"{text} after a sample was made"
    return ""


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors have the same shape, type and bits. Of sparse tensors the bits are not compared."""
    if left.shape != right.shape or left.dtype != right.dtype or left.layout is not torch.strided:
        return left.shape == right.shape and left.dtype == right.dtype
    # NaN equals NaN
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def parts_of(loader: Any) -> list[Any]:
    """Return the objects that give the order of a loader: batch sampler, its sampler and so on, and the sampler."""
    parts: list[Any] = []
    for part in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        while part is not None and not any(part is other for other in parts):
            parts.append(part)
            part = getattr(part, "sampler", getattr(part, "batch_sampler", None))
    return parts


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the number of the next epoch to ``loader``, or else to its samplers and dataset.

    If ``loader`` has no ``set_epoch``, these objects are used: the batch sampler, its sampler and so on, the sampler,
    and the dataset. The ``set_epoch`` of each, if it exists, is called once.
    """
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
        return
    for part in (*parts_of(loader), getattr(loader, "dataset", None)):
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)

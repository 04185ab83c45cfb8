"""Seeds for samples, with which random augmentation does not depend on the process that makes a sample."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, get_worker_info

from flatout.core.random_state import RandomState, generators_in
from flatout.data.loader_class import base_of, is_plain, why_not_plain
from flatout.data.loaders import SEEDED_FROM, clone_loader, is_rewindable, randomness_of, set_epoch, unsliced
from flatout.data.order import slices_of
from flatout.data.remote import InWorker


def seed_samples(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader like ``loader``, whose random augmentation does not depend on the number of workers.

    torch gives each worker process one seed. So the random numbers of a sample depend on the worker, and on the samples
    that this worker made before. The returned loader gives each sample of an epoch its own seed. The seed comes from
    the sample's place in the epoch and from one number. Each epoch draws this number from the loader's generator, or
    else from torch's default generator. The seed is set for the global generators of python, numpy and torch, and for
    those that the dataset holds. After the sample, these generators are restored. The random numbers of ``collate_fn``
    are seeded by batch. A resumed epoch (:meth:`flatout.data.Prefetcher.load_state_dict`) continues with the same
    samples.

    With ``persistent_workers`` torch draws one number fewer in later epochs. Two loaders draw the same only if they
    agree in this setting. Loaders that ``optimize`` chooses agree with the user's.

    Random numbers from other sources (the operating system, a generator that is created for each sample) are not
    seeded. A dataset with ``__getitems__`` makes a whole batch with the first sample's seed. Seeding takes about 0.1 ms
    per sample, and a tenth of this time in a worker process.

    Args:
        loader: a ``DataLoader`` over a map-style dataset.

    Raises:
        ValueError: ``loader`` is another kind of loader, or its dataset is iterable, so that samples have no index.
    """
    if not is_plain(loader):
        raise ValueError(f"loader must be a plain torch DataLoader: {why_not_plain(loader)}")
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        raise ValueError(f"samples of a {type(loader.dataset).__name__} have no index to be seeded by")
    if is_seeded(loader):
        return loader
    if (slices := slices_of(loader)) is not None:
        return slices.slice_too(seed_samples(unsliced(loader)))  # so that seeds belong to places in whole batches
    role = "sampler" if loader.batch_sampler is None else "batch_sampler"
    seeded = clone_loader(
        loader,
        dataset=SeededSamples(loader.dataset),
        collate_fn=SeededCollate(loader.collate_fn),
        **{role: SeededOrder(getattr(loader, role), loader.generator, is_batched=role == "batch_sampler")},
    )
    vars(seeded)[SEEDED_FROM] = loader
    return seeded


def is_seeded(loader: Any) -> bool:
    """Return True if each sample of ``loader`` has a seed."""
    return isinstance(loader, DataLoader) and hasattr(loader, SEEDED_FROM)


class _Key(NamedTuple):
    """Index of a sample, with the sample's seed."""

    index: Any
    seed: int


class _Sample(NamedTuple):
    """Sample for ``collate_fn``, with its seed."""

    value: Any
    seed: int


class SeededOrder:
    """Sampler, or batch sampler, that yields each index with a seed."""

    def __init__(self, order: Iterable[Any], generator: torch.Generator | None, *, is_batched: bool) -> None:
        self._order = order
        self._generator = generator
        self._is_batched = is_batched

    def __iter__(self) -> Iterator[Any]:
        # Draws at the first next(), not at iter(), because a DataLoader with workers calls iter() twice.
        epoch = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator))
        place = 0
        for indices in self._order:
            batch = indices if self._is_batched else [indices]
            keys = [_Key(index, mixed(epoch, place + i)) for i, index in enumerate(batch)]
            place += len(keys)
            yield keys if self._is_batched else keys[0]

    def __len__(self) -> int:
        return len(self._order)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of an epoch to the order."""
        set_epoch(self._order, epoch)


class _Seeding:
    """Seeding of the global generators and of those that some user code holds."""

    def __init__(self, code: Any) -> None:
        self._code = code
        self._generators: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_generators": None}  # another process has other global generators

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        if self._generators is None:
            shared = (random._inst, np.random.mtrand._rand, torch.default_generator)
            self._generators = [*shared, *generators_in(self._code)]
        return _seeded(self._generators, seed)


class SeededSamples(Dataset[Any]):
    """Dataset that seeds each sample. For an index without a seed it works as the user's dataset."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._seeding = _Seeding(dataset)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, _Key):
            return self.dataset[key]
        with self._seeding.seeded(key.seed):
            return _Sample(self.dataset[key.index], key.seed)

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        whole: Any = getattr(self.dataset, "__getitems__", None)
        if whole is None:
            return [self[key] for key in keys]
        if not isinstance(keys[0], _Key):
            return whole(keys)
        with self._seeding.seeded(keys[0].seed):
            values = whole([key.index for key in keys])
        return [_Sample(value, key.seed) for value, key in zip(values, keys, strict=True)]


class SeededWorker:
    """``worker_init_fn`` that seeds the generators of a dataset and a ``collate_fn``, and then calls the user's.

    torch seeds the global generators of python, numpy and torch in each worker process. A generator that the dataset
    holds is only copied to each worker. Without a seed all workers would draw the same numbers, in every epoch.

    Args:
        loader: the loader, with the user's ``worker_init_fn``.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._code = loader.dataset, loader.collate_fn
        self._users = loader.worker_init_fn

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        for place, generator in enumerate(generators_in(self._code)):
            _seed(generator, mixed(info.seed, place))
        if self._users is not None:
            self._users(worker)


def with_workers(loader: Any, settings: Mapping[str, Any]) -> Any:
    """Return a clone with other settings of its workers. Each worker draws other random numbers.

    Args:
        loader: as for ``clone_loader``.
        settings: arguments of ``DataLoader``, ``num_workers`` included.
    """
    base: Any = base_of(loader)
    copied = () if is_seeded(base) or not settings["num_workers"] else generators_in((base.dataset, base.collate_fn))
    init: Any = SeededWorker(base) if copied else base.worker_init_fn
    if settings["num_workers"]:
        init = InWorker(init)
    return clone_loader(loader, worker_init_fn=init, **settings)


class SeededCollate:
    """``collate_fn`` whose random numbers depend on the batch only."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._seeding = _Seeding(collate)

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, _Sample):
            value, seed = batch
        elif isinstance(batch, list) and batch and isinstance(batch[0], _Sample):
            value, seed = [sample.value for sample in batch], batch[0].seed
        else:
            return self._collate(batch)
        with self._seeding.seeded(mixed(seed, 0)):
            return self._collate(value)


def mixed(*numbers: int) -> int:
    """Return a hash of numbers, 64 bits."""
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@contextmanager
def _seeded(generators: Sequence[Any], seed: int) -> Iterator[None]:
    # A worker process needs no restoring, because it draws for samples and batches only, and each has a seed.
    with RandomState.only(generators).restored() if get_worker_info() is None else nullcontext():
        for place, generator in enumerate(generators):
            _seed(generator, mixed(seed, place))  # two generators of one type must draw different numbers
        yield


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.seed(seed)


def seeded_if_random(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the loader, with a seed for each sample if its samples are random and have an index.

    A loader whose samples cannot be made in this process is returned as it is.
    """
    if not is_plain(loader) or not is_rewindable(loader):
        return loader
    try:
        return loader if randomness_of(loader) is None else seed_samples(loader)
    except Exception:  # of the user's code, which may run in worker processes only
        return loader

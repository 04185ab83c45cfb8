"""Batches in every container, and loaders of every kind."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import flatout
from tests.differential.models import CLASSES, WORDS

SAMPLES, BATCH = 18, 4
"""Number of samples. An epoch has four batches of four samples and one of two."""


# ---- batches -----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Tensor
    y: Tensor
    name: str = "record"


class Movable:
    """Batch with ``to`` and no other interface."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, **_: Any) -> Movable:
        return Movable(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Container:
    pack: Callable[[Tensor, Tensor], Any]
    unpack: Callable[[Any], tuple[Tensor, Tensor]]
    takes: frozenset[str]
    """Kinds of batch, for losses: "pairs", "mappings", "keywords" (mappings that ``model(**batch)`` takes)."""


def _container(pack: Any, unpack: Any, *takes: str) -> Container:
    return Container(pack, unpack, frozenset({"any", *takes}))


def _by_key(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


def _by_name(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.x, batch.y


def _labels(x: Tensor) -> Tensor:
    return (x.float().flatten(1).sum(1) > 0).long()


BATCHES: dict[str, Container] = {
    "tuple": _container(lambda x, y: (x, y), tuple, "pairs"),
    "list": _container(lambda x, y: [x, y], tuple, "pairs"),
    "named tuple": _container(Pair, _by_name, "pairs"),
    "sparse pair": _container(lambda x, y: (x.to_sparse(), y), tuple, "pairs", "sparse"),
    "triple": _container(lambda x, y: (x, y, torch.ones(len(y))), lambda batch: batch[:2]),
    "dict": _container(lambda x, y: {"x": x, "y": y}, _by_key, "mappings", "keywords"),
    "user dict": _container(lambda x, y: UserDict(x=x, y=y), _by_key, "mappings", "keywords"),
    "dict with strings": _container(
        lambda x, y: {"x": x, "y": y, "names": [f"sample {int(i)}" for i in y], "epoch": 3, "none": None},
        _by_key,
        "mappings",
        "keywords",
    ),
    "nested": _container(
        lambda x, y: {"inputs": {"x": x, "size": np.ones(len(x))}, "targets": [y]},
        lambda batch: (batch["inputs"]["x"], batch["targets"][0]),
    ),
    "dataclass": _container(Record, _by_name),
    "movable object": _container(Movable, _by_name),
    "tensor": _container(lambda x, y: x, lambda batch: (batch, _labels(batch))),
}


@dataclass(frozen=True)
class Collate:
    """Collate function that puts ``default_collate``'s result into a container. The name makes it picklable."""

    batch: str

    def __call__(self, samples: Any) -> Any:
        return BATCHES[self.batch].pack(*torch.utils.data.default_collate(samples))


# ---- samples -----------------------------------------------------------------------------------------------------


def sample(kind: str, i: int, size: int = 6) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(i)
    if kind == "words":
        return torch.randint(WORDS, (size,), generator=generator), i % CLASSES
    return torch.randn((8,) if kind == "vectors" else (2, size, size), generator=generator), i % CLASSES


def fixed_batches(kind: str, batch: str, *, sizes: tuple[int, ...] = (6,)) -> list[Any]:
    """Return the batches of an epoch in order, whose inputs have the given sizes in turn."""
    made = []
    for start in range(0, SAMPLES, BATCH):
        size = sizes[start // BATCH % len(sizes)]
        made.append(Collate(batch)([sample(kind, i, size) for i in range(start, min(start + BATCH, SAMPLES))]))
    return made


class Samples(Dataset[Any]):
    """Map-style dataset that draws from the generator named by ``draws``."""

    def __init__(self, kind: str, draws: str = "") -> None:
        self.kind = kind
        self.draws = draws
        self.own = np.random.default_rng(7)
        self.random = random.Random(7)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, y = sample(self.kind, i)
        if self.draws and x.is_floating_point():
            draw = {
                "torch": lambda: torch.rand(()).item(),
                "numpy": np.random.rand,
                "python": random.random,
                "own": lambda: self.own.random() + self.random.random(),
            }
            x = x + draw[self.draws]()
        return x, y


class Counting(Samples):
    """Dataset that counts its reads."""

    reads = 0

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.reads += 1
        return super().__getitem__(i)


class Noisy(Samples):
    """Dataset that takes its noise from an iterator."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.noise = iter(torch.rand(10_000, generator=torch.Generator().manual_seed(4)).tolist())

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(i)
        noise = next(self.noise)
        return (x + noise if x.is_floating_point() else x), y


class FromFile(Samples):
    """Dataset that seeks in an open file for the labels."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.file = Path(__file__).open("rb")  # noqa: SIM115

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, _ = super().__getitem__(i)
        self.file.seek(i)
        return x, self.file.read(1)[0] % CLASSES


class Changing(Dataset[Any]):
    """Dataset whose labels change in place and whose samples get another scale, epoch by epoch. It also grows."""

    def __init__(self, kind: str) -> None:
        made = [sample(kind, i) for i in range(SAMPLES)]
        self.x, self.y = [x for x, _ in made], torch.tensor([y for _, y in made])
        self.scale = 1.0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = self.x[i]
        return (x * self.scale if x.is_floating_point() else x), int(self.y[i % SAMPLES])

    def advance(self) -> None:
        self.y.add_(1).remainder_(CLASSES)
        self.scale *= 0.9
        self.x.append(self.x[len(self.x) - SAMPLES])


class Advancing(Sampler[int]):
    """Sampler that changes the dataset when an epoch begins."""

    def __init__(self, data: Changing) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        self.data.advance()
        return iter(range(len(self.data)))


class Stream(IterableDataset[Any]):
    """Stream that can be iterated repeatedly, without a sign of this. Each sample draws from torch's generator."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        for i in range(SAMPLES):
            yield sample(self.kind, (i + int(torch.randint(SAMPLES, ()))) % SAMPLES)


class SizedStream(Stream):
    def __len__(self) -> int:
        return SAMPLES


class Backwards(Sampler[int]):
    """User's sampler, which counts its epochs."""

    def __init__(self) -> None:
        self.their_epochs = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.their_epochs += 1
        return iter(range(SAMPLES - 1, -1, -1))


class InPairs(Sampler[list[int]]):
    """User's batch sampler of two neighbors, shuffled by its own generator."""

    def __init__(self) -> None:
        self.random = random.Random(2)

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[list[int]]:
        starts = list(range(0, SAMPLES - 1, 2))
        self.random.shuffle(starts)
        return iter([[i, i + 1] for i in starts])


class Scaling(DataLoader[Any]):
    """User's loader class, which changes each batch."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield (x * 2 if x.is_floating_point() else x), y


class Refilling:
    """Loader that yields the same memory again and again."""

    def __init__(self, kind: str, batch: str) -> None:
        self.batch = batch
        self.batches = [batch for batch in fixed_batches(kind, "tuple") if len(batch[1]) == BATCH]
        self.x, self.y = (torch.empty_like(t) for t in self.batches[0])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.batches:
            self.x.copy_(x)
            self.y.copy_(y)
            yield BATCHES[self.batch].pack(self.x, self.y)


class Unsized:
    """Loader of a generator function, without a length."""

    def __init__(self, kind: str, batch: str) -> None:
        self.kind, self.batch = kind, batch

    def __iter__(self) -> Iterator[Any]:
        yield from fixed_batches(self.kind, self.batch)


# ---- loaders -----------------------------------------------------------------------------------------------------


def _tensors(kind: str) -> TensorDataset:
    made = [sample(kind, i) for i in range(SAMPLES)]
    return TensorDataset(torch.stack([x for x, _ in made]), torch.tensor([y for _, y in made]))


def _own() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _seeds(worker: int) -> None:
    np.random.seed(worker)


def _loads(data: Callable[[str], Any], size: int = BATCH, **arguments: Callable[[], Any]) -> Callable[[str, str], Any]:
    """Return a function that makes a DataLoader over ``data(kind)``. Each loader gets new arguments."""

    def load(kind: str, batch: str) -> Any:
        made = {name: argument() for name, argument in arguments.items()}
        if "batch_sampler" not in made:
            made["batch_size"] = size
        return DataLoader(data(kind), collate_fn=Collate(batch), **made)

    return load


def _changing(kind: str, batch: str) -> Any:
    data = Changing(kind)
    return DataLoader(data, BATCH, sampler=Advancing(data), collate_fn=Collate(batch))


def _half(kind: str) -> Any:
    return ConcatDataset([Subset(Samples(kind), range(9)), Subset(Samples(kind), range(9))])


def _true() -> bool:
    return True


def _default_collate(kind: str, batch: str) -> Any:
    return DataLoader(_tensors(kind), BATCH, shuffle=True)


LOADERS: dict[str, Callable[[str, str], Any]] = {
    "tensors in order": _loads(_tensors),
    "tensors shuffled": _loads(_tensors, shuffle=_true),
    "tensors, default collate": _default_collate,
    "tensors, own generator": _loads(_tensors, shuffle=_true, generator=_own),
    "full batches": _loads(_tensors, shuffle=_true, drop_last=_true),
    "batches of one": _loads(lambda kind: Subset(_tensors(kind), range(6)), size=1),
    "samples shuffled": _loads(Samples, shuffle=_true),
    "subsets": _loads(_half, shuffle=_true),
    "weighted": _loads(_tensors, sampler=lambda: WeightedRandomSampler([1.0] * 9 + [3.0] * 9, 14)),
    "random subset": _loads(_tensors, sampler=lambda: SubsetRandomSampler(range(3, 15), generator=_own())),
    "with replacement": _loads(Samples, sampler=lambda: RandomSampler(range(SAMPLES), True, 14)),
    "own sampler": _loads(Samples, sampler=Backwards),
    "own batch sampler": _loads(_tensors, batch_sampler=InPairs),
    "torch's batch sampler": _loads(
        _tensors, batch_sampler=lambda: BatchSampler(RandomSampler(range(SAMPLES)), 5, drop_last=False)
    ),
    "list of index lists": _loads(_tensors, batch_sampler=lambda: [[0, 1, 2], [3], [4, 5, 6, 7]]),
    **{f"draws from {what}": _loads(partial(Samples, draws=what), shuffle=_true) for what in ("torch", "numpy")},
    **{f"draws from {what}": _loads(partial(Samples, draws=what), shuffle=_true) for what in ("python", "own")},
    "counts reads": _loads(Counting, shuffle=_true),
    "noise of an iterator": _loads(Noisy, shuffle=_true),
    "seeks in a file": _loads(FromFile, shuffle=_true),
    "changes": _changing,
    "stream": _loads(Stream),
    "sized stream": _loads(SizedStream, generator=_own),
    "subclass": lambda kind, batch: Scaling(_tensors(kind), BATCH, shuffle=True),
    "list": fixed_batches,
    "tuple of batches": lambda kind, batch: tuple(fixed_batches(kind, batch)),
    "varied sizes": lambda kind, batch: fixed_batches(kind, batch, sizes=(6, 8)),
    "refilling": Refilling,
    "unsized": Unsized,
    "in memory": lambda kind, batch: flatout.data.InMemoryLoader(_default_collate(kind, batch)),
    "cached": lambda kind, batch: DataLoader(
        flatout.data.CachedDataset(Samples(kind)), BATCH, shuffle=True, collate_fn=Collate(batch)
    ),
    "prefetcher": lambda kind, batch: flatout.data.Prefetcher(_loads(Samples, shuffle=_true)(kind, batch), "cpu"),
    "iterator": lambda kind, batch: iter(fixed_batches(kind, batch)),
    "a worker": _loads(Samples, shuffle=_true, num_workers=lambda: 1, worker_init_fn=lambda: _seeds),
    "a persistent worker": _loads(_tensors, shuffle=_true, num_workers=lambda: 1, persistent_workers=_true),
    "stream, a persistent worker": _loads(Stream, num_workers=lambda: 1, persistent_workers=_true),
}
"""Makers of loaders. Each takes a kind of data and a container."""

YIELDS = {"subclass": "tuple", "tensors, default collate": "list", "in memory": "list"}
"""Loaders whose batches have one container only."""
WITH_WORKERS = tuple(name for name in LOADERS if name.endswith("worker"))
ONE_SHOT = ("iterator",)
READ_ONCE = (*ONE_SHOT, "refilling", "changes", "noise of an iterator")
"""Loaders whose first batches ``optimize`` takes from the training, and whose state is not put back."""
NOT_REWINDABLE = (
    *("own sampler", "own batch sampler", "stream", "sized stream", "stream, a persistent worker"),
    *("subclass", "refilling", "unsized", "iterator", "noise of an iterator", "changes"),
)
OF_ONE = ("batches of one", "list of index lists")
"""Loaders with a batch of a single sample, for which BatchNorm has no variance."""
RESEEDED = tuple(name for name in LOADERS if name.startswith("draws from "))
"""Loaders whose samples draw other random numbers in worker processes, or from seeds of ``deterministic=True``."""
DRAWS = (*RESEEDED, *(name for name in LOADERS if "stream" in name))
"""Loaders whose samples draw random numbers between two steps."""

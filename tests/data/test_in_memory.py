"""InMemoryLoader equals DataLoader(num_workers=0) in batches, order, and the states of all generators."""

from __future__ import annotations

import gc
import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from flatout.data import InMemoryLoader, why_not_in_memory
from tests.data.harness import rings_of
from tests.loaders import OwnIterator


def make_dataset(n: int) -> TensorDataset:
    image = torch.arange(n * 12, dtype=torch.float32).reshape(n, 3, 2, 2)
    return TensorDataset(image, torch.arange(n) - 5, torch.arange(n) % 2 == 0, torch.arange(n * 3).reshape(n, 3).half())


def make_subset(n: int) -> Subset:
    outer = Subset(make_dataset(n + 7), [(5 * i) % (n + 7) - (i % 2) * (n + 7) for i in range(n + 3)])
    return Subset(outer, list(range(n + 2, 2, -1)))


def make_concatenation(n: int) -> ConcatDataset:
    """Make a concatenation of tensors, subsets and another concatenation, with an empty dataset in between."""
    inner = ConcatDataset([make_dataset(3), Subset(make_dataset(6), [5, -6, 2])])
    return ConcatDataset([make_dataset(n - 11), Subset(make_dataset(2), []), inner, Subset(inner, [4, 0, -1, 3, 3])])


def make_plain_concatenation(n: int) -> ConcatDataset:
    return ConcatDataset([make_dataset(4), make_dataset(1), make_dataset(n - 5)])


def assert_same(ours, theirs) -> None:
    assert type(ours) is type(theirs) is list
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        assert our.shape == their.shape
        assert our.stride() == their.stride()
        assert torch.equal(our, their)


def trace(make_iterable, loader: DataLoader, generators: list, epochs: int, stop_after: int | None) -> list:
    """Return batches and generator states after ``iter``, after each batch and after each epoch."""
    seen: list = []

    def states() -> list:
        return [torch.get_rng_state(), *(generator.get_state() for generator in generators)]

    torch.manual_seed(3)
    iterable = make_iterable(loader)
    for _ in range(epochs):
        iterator = iter(iterable)
        seen.append(states())
        for number in itertools.count():
            if number == stop_after:
                break
            batch = next(iterator, None)
            if batch is None:
                break
            torch.rand(1)  # the model draws from the default generator in between
            seen += [batch, states()]
        del iterator
        seen.append(states())
    return seen


def on_device(loader: DataLoader) -> InMemoryLoader:
    """Run the code path for data on a GPU, with the host in place of the device."""
    return InMemoryLoader(loader, device="cpu")


ROADS = [InMemoryLoader, on_device]


def assert_equal_traces(make_loader, epochs: int = 3, stop_after: int | None = None) -> None:
    theirs_loader, theirs_generators = make_loader()
    theirs = trace(lambda loader: loader, theirs_loader, theirs_generators, epochs, stop_after)
    for road in ROADS:
        ours_loader, ours_generators = make_loader()
        ours = trace(road, ours_loader, ours_generators, epochs, stop_after)
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)


def generators_for(kind: str) -> tuple[torch.Generator | None, list]:
    generator = None if kind == "none" else torch.Generator().manual_seed(11)
    return generator, [] if generator is None else [generator]


@pytest.mark.parametrize("stop_after", [None, 0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["none", "given"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("samples", [20, 22])  # batches of 5: full and partial last batch
@pytest.mark.parametrize("make", [make_dataset, make_subset, make_concatenation, make_plain_concatenation])
def test_matrix(make, samples, shuffle, kind, drop_last, stop_after):
    def make_loader():
        generator, generators = generators_for(kind)
        dataset = make(samples)
        return DataLoader(dataset, 5, shuffle=shuffle, drop_last=drop_last, generator=generator), generators

    assert_equal_traces(make_loader, stop_after=stop_after)


class Draws(Sampler):
    """User's sampler that draws from the default generator for every index and yields NumPy integers."""

    def __init__(self, dataset):
        self.samples = len(dataset)

    def __iter__(self):
        for _ in range(self.samples + 3):
            yield np.int64(torch.randint(self.samples, ()).item() - (self.samples if torch.rand(()) < 0.5 else 0))

    def __len__(self):
        return self.samples + 3


class Eager(Sampler):
    """Batch sampler that draws in ``__iter__`` instead of ``__next__``."""

    def __init__(self, dataset, generator=None):
        self.samples, self.generator = len(dataset), generator

    def __iter__(self):
        return iter(torch.randperm(self.samples, generator=self.generator).split(5))

    def __len__(self):
        return -(-self.samples // 5)


def shares(dataset, **options):
    return [DistributedSampler(dataset, 3, rank, seed=5, **options) for rank in range(3)]


SAMPLERS = {
    "sequential": lambda d, g: SequentialSampler(d),
    "random": lambda d, g: RandomSampler(d, generator=g),
    "fewer": lambda d, g: RandomSampler(d, num_samples=len(d) // 2, generator=g),
    "more": lambda d, g: RandomSampler(d, num_samples=2 * len(d) + 3, generator=g),
    "twice": lambda d, g: RandomSampler(d, num_samples=2 * len(d), generator=g),
    "replacement": lambda d, g: RandomSampler(d, replacement=True, generator=g),
    "much replacement": lambda d, g: RandomSampler(d, replacement=True, num_samples=100, generator=g),
    "blocks of replacement": lambda d, g: RandomSampler(d, replacement=True, num_samples=64, generator=g),
    "subset": lambda d, g: SubsetRandomSampler([3, -1, 5, 8, 2, 2, 11], generator=g),
    "subset of a tensor": lambda d, g: SubsetRandomSampler(torch.arange(9), generator=g),
    "weighted": lambda d, g: WeightedRandomSampler(torch.arange(len(d)) + 0.5, 33, generator=g),
    "weighted once": lambda d, g: WeightedRandomSampler([1.0] * len(d), 12, replacement=False, generator=g),
    "share 0": lambda d, g: shares(d)[0],
    "share 2": lambda d, g: shares(d, shuffle=False)[2],
    "share without rest": lambda d, g: shares(d, drop_last=True)[1],
    "small": lambda d, g: SequentialSampler(range(4)),
    "list": lambda d, g: [4, -2, 0, 7, 7, 1],
    "user's": lambda d, g: Draws(d),
    "0-dim tensors": lambda d, g: torch.arange(11),
}


@pytest.mark.parametrize("stop_after", [None, 0, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["none", "given"])
@pytest.mark.parametrize("samples", [20, 22])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name, samples, kind, drop_last, stop_after):
    def make_loader():
        base, (own, generators) = torch.Generator().manual_seed(1), generators_for(kind)
        dataset = make_dataset(samples)
        sampler = SAMPLERS[name](dataset, own)
        return DataLoader(dataset, 5, sampler=sampler, drop_last=drop_last, generator=base), [base, *generators]

    assert_equal_traces(make_loader, stop_after=stop_after)


def test_every_epoch_of_a_distributed_sampler():
    loader = DataLoader(make_dataset(20), 5, sampler=shares(range(20))[1])
    ours = InMemoryLoader(loader)
    orders = []
    for epoch in range(3):
        ours.set_epoch(epoch)
        assert loader.sampler.epoch == epoch
        for our, their in zip(ours, loader, strict=True):
            assert_same(our, their)
        orders.append([batch[1].tolist() for batch in ours])
    assert orders[0] != orders[1] != orders[2]


BATCH_SAMPLERS = {
    "torch's": lambda d, g: BatchSampler(RandomSampler(d, generator=g), 4, True),
    "a list": lambda d, g: [[0, 1], [2], [5, -1, 3]],
    "tuples": lambda d, g: [(0, 1), (2,)],
    "the sampler's own batches": lambda d, g: Eager(d, g),
}


@pytest.mark.parametrize("stop_after", [None, 1])
@pytest.mark.parametrize("kind", ["none", "given"])
@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_batch_samplers(name, kind, stop_after):
    def make_loader():
        base, (own, generators) = torch.Generator().manual_seed(1), generators_for(kind)
        dataset = make_subset(17)
        return DataLoader(dataset, batch_sampler=BATCH_SAMPLERS[name](dataset, own), generator=base), [
            base,
            *generators,
        ]

    assert_equal_traces(make_loader, stop_after=stop_after)


@pytest.mark.parametrize(
    "sampler", [SequentialSampler(range(11)), [0, 3, 10, 4], [1, 2.5, 0]], ids=["one too many", "a list", "a fraction"]
)
def test_indices_that_the_dataset_refuses(sampler):
    """The error equals the DataLoader's and comes at the same batch. Later batches are still available."""
    outcomes = []
    for make in (InMemoryLoader, lambda loader: loader):
        iterator = iter(make(DataLoader(TensorDataset(torch.arange(10)), 2, sampler=sampler)))
        seen = []
        for _ in range(7):
            try:
                seen.append(str(next(iterator)))
            except (IndexError, TypeError, StopIteration) as error:
                seen.append((type(error), str(error)))
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]
    assert any("index" in str(outcome) or "indices" in str(outcome) for outcome in outcomes[0])


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 45),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    kind=st.sampled_from(["none", "given"]),
    stop_after=st.none() | st.integers(0, 6),
    depth=st.integers(1, 5),
    threads=st.integers(1, 3),
)
def test_any_size(samples, batch_size, drop_last, shuffle, kind, stop_after, depth, threads):
    def run(make_iterable):
        generator, generators = generators_for(kind)
        loader = DataLoader(
            make_dataset(samples), batch_size, shuffle=shuffle, drop_last=drop_last, generator=generator
        )
        return trace(make_iterable, loader, generators, 2, stop_after)

    ours = run(lambda loader: InMemoryLoader(loader, depth=depth, threads=threads))
    theirs = run(lambda loader: loader)
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert_same(our, their)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [(), (1,), (3, 5), (0,), (2, 0), (33,)], ids=str)
def test_dtypes_and_rows(dtype, row, road):
    data = torch.randint(0, 2, (13, *row)).to(dtype)
    loader = DataLoader(TensorDataset(data), 4, sampler=SubsetRandomSampler(range(13)))
    torch.manual_seed(0)
    theirs = list(loader)
    torch.manual_seed(0)
    for our, their in zip(road(loader), theirs, strict=True):
        assert_same(our, their)


@pytest.mark.parametrize("sampler", [SubsetRandomSampler(range(72)), SequentialSampler(range(72))], ids=["any", "all"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("row", [511, 512, 513, 520, 3 * 32 * 32, 3 * 224 * 224, 3 * 224 * 224 + 1])
def test_long_rows(row, parts, sampler):
    """Batches have up to 9.6 MB. Rows are copied one by one, with non-temporal stores where they are aligned."""
    data = torch.randint(256, (72, row), dtype=torch.uint8).chunk(parts)
    loader = DataLoader(ConcatDataset(list(map(TensorDataset, data))), 64, sampler=sampler)
    torch.manual_seed(0)
    theirs = list(loader)
    torch.manual_seed(0)
    for our, their in zip(InMemoryLoader(loader), theirs, strict=True):
        assert_same(our, their)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_strided_rows(shuffle, road):
    wide = torch.arange(26 * 8).reshape(26, 8)
    dataset = TensorDataset(wide[::2, 2:5], wide[1::2, 0], wide[:1].expand(13, 8))
    loader = DataLoader(dataset, 4, shuffle=shuffle, generator=torch.Generator().manual_seed(0))
    theirs = list(loader)
    loader.generator.manual_seed(0)
    for our, their in zip(road(loader), theirs, strict=True):
        assert_same(our, their)


def test_data_on_the_device_is_a_copy():
    data = torch.arange(8)
    loader = on_device(DataLoader(TensorDataset(data), 4))
    (first,), (second,) = loader
    assert torch.cat([first, second]).tolist() == list(range(8))
    first.zero_()  # the user owns the batch
    assert next(iter(loader))[0].tolist() == [0, 1, 2, 3]
    data.numpy()[:] = 7  # the next epoch copies the data again
    assert next(iter(loader))[0].tolist() == [7, 7, 7, 7]


def test_random_split():
    first, _ = random_split(make_dataset(50), [0.7, 0.3], generator=torch.Generator().manual_seed(4))
    loader = DataLoader(first, 8)
    for our, their in zip(InMemoryLoader(loader), loader, strict=True):
        assert_same(our, their)


def test_held_batches_stay_valid():
    loader = DataLoader(make_dataset(503), 2)
    ours = InMemoryLoader(loader)
    for _ in range(2):
        held = list(ours)
        for our, their in zip(held, loader, strict=True):
            assert_same(our, their)
    # A tensor may outlive its batch, its loader and its iterator.
    label = held[7][1]
    expected = label.clone()
    del held, ours
    gc.collect()
    assert torch.equal(label, expected)


def test_batches_are_the_users_own():
    dataset = make_dataset(12)
    before = dataset.tensors[0].clone()
    for image, *_ in InMemoryLoader(DataLoader(dataset, 4)):
        image.zero_()
    assert torch.equal(dataset.tensors[0], before)


def test_slots_are_reused():
    ours = InMemoryLoader(DataLoader(make_dataset(400), 4))
    for _ in range(3):
        for _batch in ours:
            pass
    assert rings_of(ours)[0].allocations <= (ours.depth + 3) * 4


def test_keeping_one_tensor_keeps_only_its_memory():
    images, labels = torch.zeros(64, 1 << 20, dtype=torch.uint8), torch.arange(64)
    ours = InMemoryLoader(DataLoader(TensorDataset(images, labels), 1))
    held = [label for _, label in ours]
    assert torch.equal(torch.cat(held), labels)
    assert rings_of(ours)[0].allocations <= 64 + 2 * (ours.depth + 3)


def test_pinned_batches_are_torchs_own(monkeypatch):
    """torch does not recognize flatout's pinned memory. Batches that users copy themselves must be pinned by torch."""
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    ours = InMemoryLoader(DataLoader(make_dataset(8), 4, pin_memory=True))
    batches = [tensor for batch in ours for tensor in batch]
    assert [id(tensor) for tensor in batches] == [id(tensor) for tensor in pinned]
    assert [ring.device for ring in rings_of(ours)] == [-1]


def test_two_iterators_at_once():
    loader = DataLoader(make_dataset(30), 4)
    ours = InMemoryLoader(loader)
    for one, two, their in zip(ours, ours, loader, strict=True):
        assert_same(one, their)
        assert_same(two, their)


def test_ends_like_an_iterator():
    iterator = iter(InMemoryLoader(DataLoader(make_dataset(4), 4)))
    next(iterator)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_attributes():
    loader = DataLoader(make_dataset(10), 3)
    ours = InMemoryLoader(loader)
    assert len(ours) == len(loader) == 4
    assert ours.dataset is loader.dataset
    assert ours.sampler is loader.sampler
    assert ours.batch_sampler is loader.batch_sampler
    assert ours.batch_size == 3
    ours.set_epoch(1)  # the dataset has no such method, so no error


def test_changes_of_the_data_are_seen():
    dataset = make_dataset(8)
    ours = InMemoryLoader(DataLoader(dataset, 8))
    next(iter(ours))
    dataset.tensors[1].fill_(7)
    assert next(iter(ours))[1].tolist() == [7] * 8
    dataset.tensors = tuple(tensor.clone() for tensor in dataset.tensors)
    dataset.tensors[1].fill_(9)
    gc.collect()
    assert next(iter(ours))[1].tolist() == [9] * 8


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor(index**2)


class MyTensors(TensorDataset):
    pass


class MyConcatenation(ConcatDataset):
    pass


DATA = TensorDataset(torch.zeros(10, 2))
REFUSED = {
    "type of the loader": (lambda: OwnIterator(DATA), "OwnIterator"),
    "type of the dataset": (lambda: DataLoader(Squares()), "Squares"),
    "subclass of TensorDataset": (lambda: DataLoader(MyTensors(torch.zeros(3))), "MyTensors"),
    "collate": (lambda: DataLoader(DATA, collate_fn=lambda samples: samples), "collate_fn"),
    "unbatched": (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
    "gradients": (lambda: DataLoader(TensorDataset(torch.zeros(3, requires_grad=True))), "requires grad"),
    "parameter": (lambda: DataLoader(TensorDataset(torch.nn.Parameter(torch.zeros(3)))), "Parameter"),
    "permuted": (
        lambda: DataLoader(TensorDataset(torch.zeros(3, 4, 4, 2).permute(0, 3, 1, 2))),
        "contiguous",
    ),
    "indices too large": (lambda: DataLoader(Subset(DATA, [10])), "Subset.indices"),
    "float indices": (lambda: DataLoader(Subset(DATA, [0.5])), "Subset.indices"),
    "concatenation of others": (lambda: DataLoader(ConcatDataset([DATA, Squares()])), "Squares"),
    "different samples": (
        lambda: DataLoader(ConcatDataset([DATA, TensorDataset(torch.zeros(10, 3))])),
        "types",
    ),
    "subclass of ConcatDataset": (lambda: DataLoader(MyConcatenation([DATA])), "MyConcatenation"),
    "worker init": (
        lambda: DataLoader(DATA, num_workers=1, worker_init_fn=lambda worker: None),
        "worker_init_fn",
    ),
    "float8": (lambda: DataLoader(TensorDataset(torch.zeros(3).to(torch.float8_e5m2))), "float8"),
    "not a loader": (lambda: [1, 2], "list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_reason(name):
    make_loader, fact = REFUSED[name]
    loader = make_loader()
    assert fact in why_not_in_memory(loader)
    with pytest.raises(ValueError, match=re.escape(fact)):
        InMemoryLoader(loader)


def test_refused_when_collate_of_tensors_was_replaced(monkeypatch):
    from torch.utils.data._utils import collate

    assert why_not_in_memory(DataLoader(DATA)) is None
    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, lambda batch, **_: batch)
    assert "collate_fn" in why_not_in_memory(DataLoader(DATA, collate_fn=default_collate))


def test_depth_is_checked():
    with pytest.raises(ValueError, match=r"^depth .* 0$"):
        InMemoryLoader(DataLoader(DATA), depth=0)

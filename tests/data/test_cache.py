"""cache_in_memory: the batches of a decoded dataset, and everything that must not be cached."""

from __future__ import annotations

import collections
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from flatout.data import NotCacheable, cache_in_memory
from flatout.data.cache import available_memory


class Point(NamedTuple):
    x: object
    y: object


class Made(Dataset):
    """Samples made by a function of the index."""

    def __init__(self, make, length: int = 23):
        self.make = make
        self.length = length
        self.calls: list = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.calls.append(index)
        return self.make(index)


class Batched(Made):
    def __getitems__(self, indices):
        return [self.make(index) for index in indices]


SAMPLES = {
    "tuple": lambda i: (torch.full((2, 3), i), i),
    "list": lambda i: [torch.tensor(i), i / 3],
    "dict": lambda i: {"x": np.full((4,), i, dtype=np.float32), "n": i, "inner": (i * 1.0, i % 2 == 0)},
    "ordered": lambda i: collections.OrderedDict(b=i, a=torch.tensor([i])),
    "namedtuple": lambda i: Point(np.uint8(i), np.float64(i)),
    "tensor": lambda i: torch.arange(6).reshape(2, 3) + i,
    "int": lambda i: i * 1_000_000_007,
    "float": lambda i: float("nan") if i == 3 else i / 7,
    "bool": lambda i: i % 3 == 0,
    "bf16": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
    "permuted": lambda i: torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1) * i,
    "numpy bool": lambda i: np.bool_(i % 2),
    "numpy views": lambda i: np.arange(10)[: i % 1 + 4],
    "nested lists": lambda i: [[i, (i, torch.tensor(i))], {"k": [i]}],
}


def same(left, right) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.stride() == right.stride()
            and left.numpy(force=True).tobytes() == right.numpy(force=True).tobytes()
            if left.dtype is not torch.bfloat16
            else torch.equal(left, right)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return len(left) == len(right) and all(map(same, left, right))


@pytest.mark.parametrize("dataset", [Made, Batched, lambda make: Subset(Made(make), [5, 1, 17, 1])])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_equals_the_loader(name, shuffle, dataset):
    def run(wrap):
        loader = wrap(DataLoader(dataset(SAMPLES[name]), 5, shuffle=shuffle))
        torch.manual_seed(2)
        return [batch for _ in range(2) for batch in loader], torch.get_rng_state()

    ours, our_state = run(cache_in_memory)
    theirs, their_state = run(lambda loader: loader)
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))
    assert torch.equal(our_state, their_state)


def test_each_sample_once_in_order_then_never_again():
    dataset = Made(lambda i: i, 100)
    loader = cache_in_memory(DataLoader(dataset, 10, shuffle=True))
    assert dataset.calls[:100] == list(range(100))
    assert 8 <= len(dataset.calls[100:]) <= 16
    dataset.calls.clear()
    assert sum(int(batch.sum()) for batch in loader) == 4950
    assert dataset.calls == []


def test_batches_do_not_share_containers():
    first, second = cache_in_memory(DataLoader(Made(SAMPLES["dict"]), 12))
    first["x"].zero_()
    first["new"] = first.pop("n")
    assert list(second) == ["x", "n", "inner"]


def from_closure():
    own = random.Random(1)
    return lambda i: own.random()


class Attribute:
    """A transform with a generator of its own, as torchvision-like transforms have."""

    def __init__(self, own, draw):
        self.transforms = [{"rng": own}]
        self.draw = draw

    def __call__(self, i):
        return self.draw(self.transforms[0]["rng"])


def hidden(i, _count=iter(range(10**9))):  # noqa: B008  (state that no generator shows)
    return next(_count)


RANDOM = {
    "torch": (lambda: lambda i: torch.rand(2), "torch's default generator"),
    "random": (lambda: lambda i: random.random(), "Python's random"),
    "numpy": (lambda: lambda i: np.random.rand(), "NumPy's global generator"),
    "torch, rarely": (lambda: lambda i: torch.rand(()) if i == 20 else torch.tensor(0.0), "torch's default"),
    "seeds": (lambda: lambda i: (torch.manual_seed(i), torch.tensor(i))[1], "torch's default generator"),
    "drawn and dropped": (lambda: lambda i: (random.random(), i)[1], "Python's random"),
    "torch.Generator": (
        lambda: Attribute(torch.Generator(), lambda own: torch.rand(2, generator=own)),
        r"torch\S*Generator of the dataset",
    ),
    "numpy.Generator": (
        lambda: Attribute(np.random.default_rng(0), lambda own: own.random()),
        "Generator of the",
    ),
    "numpy.RandomState": (
        lambda: Attribute(np.random.RandomState(0), lambda own: own.rand()),
        "RandomState of the",
    ),
    "random.Random": (from_closure, "random.Random of the dataset"),
    "hidden": (lambda: hidden, "two different results"),
    "SystemRandom": (lambda: lambda i: random.SystemRandom().random(), "two different results"),
}


def states():
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


@pytest.mark.parametrize("dataset", [Made, Batched])
@pytest.mark.parametrize("name", RANDOM)
def test_random_datasets_are_refused_and_generators_restored(name, dataset):
    make, words = RANDOM[name]
    before = states()
    with pytest.raises(NotCacheable, match=words):
        cache_in_memory(DataLoader(dataset(make()), 4))
    assert states() == before


def test_generators_of_the_dataset_are_restored():
    for own in (random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()):
        draw = (lambda own: torch.rand(2, generator=own)) if isinstance(own, torch.Generator) else None
        dataset = Made(Attribute(own, draw or (lambda own: own.random())))
        first = dataset[0]
        own_again = type(own)() if isinstance(own, torch.Generator) else None
        with pytest.raises(NotCacheable):
            cache_in_memory(DataLoader(dataset))
        second = dataset[0]
        if own_again is not None:
            assert torch.equal(torch.rand(2, generator=own_again), first)
            assert torch.equal(torch.rand(2, generator=own_again), second)
        else:
            fresh = {random.Random: random.Random, np.random.RandomState: np.random.RandomState}.get(
                type(own), np.random.default_rng
            )(0)
            assert [fresh.random(), fresh.random()] == [first, second]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Epochs(Made):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Unsized:
    def __getitem__(self, index):
        return index


def raises(i):
    if i == 7:
        raise OSError("broken file")
    return i


REFUSED = {
    "ragged": (lambda: Made(lambda i: torch.zeros(i)), "differ in shape"),
    "dtype varies": (
        lambda: Made(lambda i: np.zeros(2, np.float32 if i else np.float64)),
        "differ in shape|float32",
    ),
    "type varies": (lambda: Made(lambda i: i if i < 9 else float(i)), r"dataset\[9\] is made of other types"),
    "keys vary": (lambda: Made(lambda i: {"a" if i < 9 else "b": i}), "other types"),
    "length varies": (lambda: Made(lambda i: [0] * (1 + i // 9)), "other types"),
    "strings": (lambda: Made(lambda i: (i, str(i))), "strings"),
    "bytes": (lambda: Made(lambda i: b"x"), "strings"),
    "none": (lambda: Made(lambda i: (i, None)), "NoneType"),
    "object": (lambda: Made(lambda i: object()), "object"),
    "string array": (lambda: Made(lambda i: np.array(["a"])), "cannot be collated"),
    "big ints": (lambda: Made(lambda i: 2**70), "cannot be collated"),
    "empty samples": (lambda: Made(lambda i: ()), "no tensor"),
    "no samples": (lambda: Made(lambda i: i, 0), "empty"),
    "gradients": (lambda: Made(lambda i: torch.ones(2, requires_grad=True)), "requires grad"),
    "meta": (lambda: Made(lambda i: torch.ones(2, device="meta")), "meta"),
    "sparse": (lambda: Made(lambda i: torch.eye(2).to_sparse()), "collated"),
    "raises": (lambda: Made(raises), r"raised OSError: broken file"),
    "iterable": (lambda: Stream(), "not map-style"),
    "epochs": (lambda: Epochs(lambda i: i), "set_epoch"),
    "parameter": (lambda: Made(lambda i: torch.nn.Parameter(torch.ones(1))), "Parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    make, words = REFUSED[name]
    before = states()
    with pytest.raises(NotCacheable, match=words):
        cache_in_memory(DataLoader(make(), 2))
    assert states() == before


def test_loaders_are_refused_before_anything_is_decoded():
    dataset = Made(lambda i: i)
    for options in ({"collate_fn": list}, {"batch_size": None}):
        with pytest.raises(NotCacheable):
            cache_in_memory(DataLoader(dataset, **options))
    assert dataset.calls == []


def test_budget():
    dataset = Made(lambda i: (torch.zeros(256), i), 100)
    with pytest.raises(NotCacheable, match="take 103,200 bytes, the budget is 103,199"):
        cache_in_memory(DataLoader(dataset), byte_budget=103_199)
    assert len(dataset.calls) == 1
    assert len(cache_in_memory(DataLoader(dataset), byte_budget=103_200)) == 100
    assert 0 < available_memory() < 2**50


def test_one_sample_and_tensor_datasets():
    (batch,) = cache_in_memory(DataLoader(Made(lambda i: i, 1)))
    assert batch.tolist() == [0]
    permuted = TensorDataset(torch.randn(6, 4, 4, 3).permute(0, 3, 1, 2))
    loader = DataLoader(permuted, 2)
    assert all(map(same, cache_in_memory(loader), loader))

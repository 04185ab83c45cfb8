"""Datasets with every kind of sample: cacheable, random, and unsupported."""

from __future__ import annotations

import collections
import random
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Point(NamedTuple):
    x: object
    y: object


class Made(Dataset):
    """Dataset of samples that a function makes from the index."""

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
    "transposed": lambda i: (torch.arange(6).reshape(2, 3).t() + i, np.arange(6).reshape(2, 3).T + i),
    "cropped": lambda i: torch.arange(i, i + 60).reshape(5, 4, 3).permute(2, 0, 1)[:, 1:, :2],
    "broadcast": lambda i: torch.full((1, 2, 3), i).expand(3, -1, -1),
    "no dimensions": lambda i: (np.array(i, np.int16), torch.tensor(i / 2)),
    "no elements": lambda i: (torch.empty(0, 2), i),
    "wide": lambda i: (np.full((2,), 2**63 + i, np.uint64), torch.tensor(i, dtype=torch.complex64), np.float16(i)),
    "permuted": lambda i: torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1) * i,
    "numpy bool": lambda i: np.bool_(i % 2),
    "numpy views": lambda i: np.arange(10)[: i % 1 + 4],
    "nested lists": lambda i: [[i, (i, torch.tensor(i))], {"k": [i]}],
}


def same(left, right) -> bool:
    """Compare types, shapes, strides and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (int, float, np.generic)):
        return np.asarray(left).tobytes() == np.asarray(right).tobytes()
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.strides, left.tobytes()) == (
            right.dtype,
            right.shape,
            right.strides,
            right.tobytes(),
        )
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


def own_memory(sample):
    """Return the sample in its own memory, as ``clone`` and ``copy`` do."""
    if isinstance(sample, torch.Tensor):
        return sample.clone()
    if isinstance(sample, np.ndarray):
        return sample.copy(order="K")
    if isinstance(sample, dict):
        return type(sample)((key, own_memory(value)) for key, value in sample.items())
    if isinstance(sample, (list, tuple)):
        parts = map(own_memory, sample)
        return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
    return sample


def from_closure():
    own = random.Random(1)
    return lambda i: own.random()


class Attribute:
    """Transform with its own generator, like those of torchvision."""

    def __init__(self, own, draw):
        self.transforms = [{"rng": own}]
        self.draw = draw

    def __call__(self, i):
        return self.draw(self.transforms[0]["rng"])


def hidden(i, _count=iter(range(10**9))):  # noqa: B008  (state that no generator shows)
    return next(_count)


# name: function of a dataset, code of the reason, and the part that the message names
RANDOM = {
    "torch": (lambda: lambda i: torch.rand(2), "random-samples", "torch"),
    "random": (lambda: lambda i: random.random(), "random-samples", "Python's random"),
    "numpy": (lambda: lambda i: np.random.rand(), "random-samples", "NumPy"),
    "torch, rarely": (lambda: lambda i: torch.rand(()) if i == 20 else torch.tensor(0.0), "random-samples", "torch"),
    "seeds": (lambda: lambda i: (torch.manual_seed(i), torch.tensor(i))[1], "random-samples", "torch"),
    "drawn and dropped": (lambda: lambda i: (random.random(), i)[1], "random-samples", "Python's random"),
    "torch.Generator": (
        lambda: Attribute(torch.Generator(), lambda own: torch.rand(2, generator=own)),
        "random-samples",
        r"torch\S*Generator of",
    ),
    "numpy.Generator": (
        lambda: Attribute(np.random.default_rng(0), lambda own: own.random()),
        "random-samples",
        r"\bGenerator of",
    ),
    "numpy.RandomState": (
        lambda: Attribute(np.random.RandomState(0), lambda own: own.rand()),
        "random-samples",
        "RandomState of",
    ),
    "random.Random": (from_closure, "random-samples", r"random\.Random of"),
    "hidden": (lambda: hidden, "samples-not-repeatable", r"dataset\[\d+\]"),
    "SystemRandom": (lambda: lambda i: random.SystemRandom().random(), "samples-not-repeatable", r"dataset\[\d+\]"),
}


def states():
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


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


# name: dataset, code of the reason, and the part that the message names
REFUSED = {
    "ragged": (lambda: Made(lambda i: torch.zeros(i)), "shapes-differ", r"\(\d+,\)"),
    "dtype varies": (
        lambda: Made(lambda i: np.zeros(2, np.float32 if i else np.float64)),
        "shapes-differ",
        "float32.*float64",
    ),
    "type varies": (lambda: Made(lambda i: i if i < 9 else float(i)), "types-differ", r"dataset\[9\]"),
    "keys vary": (lambda: Made(lambda i: {"a" if i < 9 else "b": i}), "types-differ", r"dataset\[\d+\]"),
    "length varies": (lambda: Made(lambda i: [0] * (1 + i // 9)), "types-differ", r"dataset\[\d+\]"),
    "strings": (lambda: Made(lambda i: (i, str(i))), "type-not-cacheable", "string"),
    "bytes": (lambda: Made(lambda i: b"x"), "type-not-cacheable", "string"),
    "none": (lambda: Made(lambda i: (i, None)), "type-not-cacheable", "NoneType"),
    "object": (lambda: Made(lambda i: object()), "type-not-cacheable", "object"),
    "string array": (lambda: Made(lambda i: np.array(["a"])), "type-not-cacheable", "<U1"),
    "big-endian array": (lambda: Made(lambda i: np.zeros(2, ">f4")), "type-not-cacheable", ">f4"),
    "big ints": (lambda: Made(lambda i: 2**63), "type-not-cacheable", r"\bint\b.*64"),
    "later big ints": (
        lambda: Made(lambda i: -(2**63) - (i == 9)),
        "type-not-cacheable",
        r"dataset\[9\].*\bint\b.*64",
    ),
    "empty samples": (lambda: Made(lambda i: ()), "samples-empty", r"dataset\[0\]"),
    "no samples": (lambda: Made(lambda i: i, 0), "dataset-empty", "dataset"),
    "gradients": (lambda: Made(lambda i: torch.ones(2, requires_grad=True)), "type-not-cacheable", "requires grad"),
    "meta": (lambda: Made(lambda i: torch.ones(2, device="meta")), "type-not-cacheable", "meta"),
    "sparse": (lambda: Made(lambda i: torch.eye(2).to_sparse()), "type-not-cacheable", "torch.sparse_coo"),
    "raises": (lambda: Made(raises), "sample-failed", r"dataset\[7\].*OSError: broken file"),
    "iterable": (lambda: Stream(), "not-map-style", "Stream"),
    "epochs": (lambda: Epochs(lambda i: i), "samples-change", "set_epoch"),
    "gradients later": (
        lambda: Made(lambda i: torch.ones(2, requires_grad=i == 9)),
        "type-not-cacheable",
        r"dataset\[9\].*requires grad",
    ),
    "device varies": (
        lambda: Made(lambda i: torch.ones(2, device="meta" if i == 9 else "cpu")),
        "type-not-cacheable",
        r"dataset\[9\].*meta",
    ),
    "parameter": (lambda: Made(lambda i: torch.nn.Parameter(torch.ones(1))), "type-not-cacheable", "Parameter"),
}


class Counted(Dataset):
    """Picklable dataset with every kind of sample, which counts how often it makes each."""

    made: torch.Tensor

    def __init__(self, length: int = 37):
        self.made = torch.zeros(length, dtype=torch.int64).share_memory_()
        self.classes = ["cat", "dog"]

    def __len__(self):
        return len(self.made)

    def __getitem__(self, index):
        if not -len(self) <= index < len(self):
            raise IndexError(f"no sample {index}")
        self.made[index] += 1
        index = int(index)
        return {name: make(index) for name, make in SAMPLES.items()}

"""Contents: every change of what a dataset can reach is seen, and nothing else."""

from __future__ import annotations

import collections
import ctypes
import functools
import multiprocessing
import queue
import socket
import sqlite3
import threading
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from flatout.core.contents import Contents

LEVEL = 1


class Config:
    level = 1
    other = 1


def leveled():
    return LEVEL * Config.level


class Slotted:
    __slots__ = ("a",)

    def __init__(self):
        self.a = 1


class Items(list):
    pass


class Samples(Dataset):
    scale = 1
    unused = 1

    def __init__(self):
        weight = [2.0]
        self.epoch = 0
        self.level = 0.5
        self.value = multiprocessing.Value("i", 0)
        self.shared = multiprocessing.Array("d", 100)
        self.raw = (ctypes.c_int * 2)(1, 2)
        self.x = torch.randn(64, 8)
        self.small = torch.zeros((), dtype=torch.bfloat16)
        self.targets = np.zeros(10_000, dtype=np.int64)
        self.strided = np.zeros((8, 8)).T
        self.objects = np.array([[1], [2]], dtype=object)
        self.files = [str(i) for i in range(500)]
        self.nested = {"a": ({"b": [1]},)}
        self.queue = collections.deque([1, 2])
        self.names = {"a", "b"}
        self.bytes = bytearray(10)
        self.array = array("d", [1.0])
        self.slotted = Slotted()
        self.items = Items([1])
        self.transform = functools.partial(lambda x, scale: x * scale * weight[0], scale=[3])
        self.weight = weight

    def __len__(self):
        return len(self.x)

    @property
    def factor(self):
        return leveled()

    def __getitem__(self, index):
        return self.x[index] * self.factor * self.scale


def set_global(name, value):
    globals()[name] = value


CHANGES = {
    "number": lambda data: setattr(data, "epoch", 1),
    "equal size": lambda data: setattr(data, "level", 0.25),
    "new attribute": lambda data: setattr(data, "other", 1),
    "removed attribute": lambda data: delattr(data, "level"),
    "attributes": lambda data: setattr(data, "__dict__", dict(vars(data))),
    "shared number": lambda data: setattr(data.value, "value", 3),
    "shared array": lambda data: data.shared.__setitem__(50, 1.0),
    "ctypes": lambda data: data.raw.__setitem__(1, 5),
    "tensor": lambda data: data.x[3].zero_(),
    "tensor through NumPy": lambda data: data.x.numpy().__setitem__((3, 3), 7.0),
    "tensor's data": lambda data: setattr(data.x, "data", torch.zeros(64, 8)),
    "bfloat16": lambda data: data.small.fill_(1),
    "array": lambda data: data.targets.__setitem__(5, 1),
    "order of an array": lambda data: data.targets.__setitem__(slice(2), [0, 0]) or data.targets[::-1].sort(),
    "array of any strides": lambda data: data.strided.__setitem__((3, 2), 1),
    "array of objects": lambda data: data.objects.__setitem__((0, 0), 5),
    "list": lambda data: data.files.__setitem__(300, "x"),
    "longer list": lambda data: data.files.append("x"),
    "nested": lambda data: data.nested["a"][0]["b"].append(2),
    "deque": lambda data: data.queue.rotate(1),
    "set": lambda data: data.names.add("c"),
    "bytearray": lambda data: data.bytes.__setitem__(3, 1),
    "array.array": lambda data: data.array.__setitem__(0, 2.0),
    "slot": lambda data: setattr(data.slotted, "a", 2),
    "list of a class": lambda data: data.items.append(2),
    "argument of a partial": lambda data: data.transform.keywords["scale"].append(1),
    "closure": lambda data: data.weight.__setitem__(0, 3.0),
    "attribute of the class": lambda data: setattr(Samples, "scale", 2),
    "method": lambda data: setattr(Samples, "__len__", lambda self: 3),
    "attribute of a class that a function names": lambda data: setattr(Config, "level", 2),
    "global": lambda data: set_global("LEVEL", 2),
    "function": lambda data: set_global("leveled", lambda: 3),
}


@pytest.fixture(autouse=True)
def same_code():
    before = LEVEL, leveled, Config.level, Samples.scale, Samples.__len__
    yield
    globals()["LEVEL"], globals()["leveled"], Config.level, Samples.scale, Samples.__len__ = before


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    data = Samples()
    data.targets[:] = np.arange(10_000)
    contents = Contents(Subset(random_split(ConcatDataset([data]), [40, 24])[0], [1, 2, 3]))
    assert contents.opaque == ""
    assert contents.changed() == contents.changed_nearby() == ""
    CHANGES[name](data)
    assert contents.changed() != ""


def test_what_no_sample_uses_may_change():
    contents = Contents(Samples())
    Samples.unused = Config.other = 2
    assert contents.changed() == ""


@pytest.mark.parametrize(
    "name", ["number", "shared number", "tensor", "longer list", "global", "attribute of the class", "new attribute"]
)
def test_what_is_nearby_is_seen_at_once(name):
    data = Samples()
    contents = Contents(Subset(data, [0]))
    CHANGES[name](data)
    assert contents.changed_nearby() != ""


def test_the_clause_names_the_attribute():
    data = Samples()
    contents = Contents(Subset(data, [0]))
    data.epoch = 1
    assert contents.changed() == "attribute 'epoch' of a Samples has changed"


def test_what_reading_has_changed_is_ignored():
    data = Samples()
    contents = Contents(data)
    data.epoch, data.cache = 5, {1: 2}
    data.files.append("x")
    data.shared[3] = 1.0
    contents.ignore_changes()
    assert contents.changed() == contents.changed_nearby() == ""
    data.epoch, data.cache = 6, {3: 4}
    data.files.clear()
    assert contents.changed() == ""
    data.level = 2
    assert contents.changed() != ""


def generator():
    yield 1


@pytest.mark.parametrize("make", [lambda: iter([1]), generator, lambda: sqlite3.connect(":memory:"), socket.socket])
def test_what_cannot_be_seen_is_named(make):
    data = Samples()
    data.source = [make()]
    assert "'source'" in Contents(data).opaque


@pytest.mark.parametrize("make", [threading.Lock, queue.Queue, lambda: torch.Generator(), lambda: __file__])
def test_what_is_no_part_of_samples_is_not_opaque(make):
    data = Samples()
    data.source = make()
    assert Contents(data).opaque == ""


def test_an_open_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    data = Samples()
    with path.open("rb") as data.file:
        contents = Contents(data)
        assert contents.opaque == ""
        data.file.read(1)
        assert contents.changed() == ""
        path.write_bytes(b"abcd")
        assert contents.changed() != ""


LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.floats(allow_nan=False), st.none())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
)


def containers(tree):
    """Return the containers in a tree."""
    if not isinstance(tree, (list, dict)):
        return []
    values = tree.values() if isinstance(tree, dict) else tree
    return [tree, *(found for value in values for found in containers(value))]


@given(tree=st.lists(TREES, min_size=1, max_size=4), data=st.data())
def test_a_change_at_any_depth_is_seen(tree, data):
    contents = Contents(tree)
    assert contents.changed() == ""
    changed = data.draw(st.sampled_from(containers(tree)))
    if isinstance(changed, dict):
        changed["new"] = changed.get("new", 0) != 0
        changed["newer"] = 1
    else:
        changed.append(1)
    assert contents.changed() != ""


@given(
    size=st.integers(1, 100_000),
    dtype=st.sampled_from([np.uint8, np.int16, np.float32, np.float64, np.complex64]),
    data=st.data(),
)
def test_a_written_element_of_any_array_is_seen(size, dtype, data):
    values = np.zeros(size, dtype)
    contents = Contents([values])
    place = data.draw(st.integers(0, size - 1))
    values[place] = 1
    assert contents.changed() != ""
    moved = Contents([values])
    values[place] = 0
    values[(place + data.draw(st.integers(1, size))) % size] = 1
    assert (moved.changed() != "") == (values[place] == 0)

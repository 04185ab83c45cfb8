"""Batches of any nesting: types and order are preserved."""

from __future__ import annotations

import collections
import dataclasses
import operator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from flatout.core.batches import cloned
from flatout.data import batch_size_of, map_tensors, tensors_of, to_device


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    twice: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "twice", self.x * 2)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("missing", "x")
    x: Any
    missing: Any


class MyList(list):
    pass


class MyTuple(tuple):
    pass


class Holder:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Holder(self.x.to(device))


def t(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


NESTED = {
    "tensor": t(2),
    "pair": (t(2), t(3)),
    "list": [t(2), [t(3), "a"], None],
    "dict": {"x": t(2), "n": 3, "inner": {"y": t(1)}},
    "namedtuple": Pair(t(2), {"a": t(3)}),
    "ordered": collections.OrderedDict(b=t(2), a=t(1)),
    "default": collections.defaultdict(list, x=t(2)),
    "user dict": collections.UserDict(x=t(2)),
    "deque": MyList([t(2), 1]),
    "tuple subclass": MyTuple([t(2), 1]),
    "leaves": ("s", b"b", 1, 1.5, None, True, range(3), bytearray(b"x"), 2j),
    "empty": ((), [], {}),
}


def same(left, right) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (dict, collections.UserDict)):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("name", NESTED)
def test_map_keeps_types_and_leaves_the_original_alone(name):
    batch = NESTED[name]
    before = [tensor.clone() for tensor in tensors_of(batch)]
    assert same(map_tensors(lambda tensor: tensor, batch), batch)
    moved = map_tensors(lambda tensor: tensor + 1, batch)
    assert all(map(torch.equal, tensors_of(batch), before))
    assert all(map(torch.equal, tensors_of(moved), [tensor + 1 for tensor in before]))


def test_map_visits_in_the_order_of_tensors_of():
    batch = [NESTED, Frozen(t(4), "f")]
    visited: list = []
    map_tensors(visited.append, batch)
    assert all(map(torch.Tensor.is_set_to, visited, tensors_of(batch)))
    assert len(visited) == len(tensors_of(batch)) > 10


def test_dataclasses():
    moved = map_tensors(lambda tensor: tensor + 1, Frozen(t(2), "name"))
    assert (moved.name, moved.x.tolist(), moved.twice.tolist()) == ("name", [1, 2], [1, 3])
    slotted = Slotted.__new__(Slotted)
    slotted.x = t(2)
    assert map_tensors(lambda tensor: tensor + 1, slotted).x.tolist() == [1, 2]


def test_default_factory_survives():
    moved = map_tensors(lambda tensor: tensor, NESTED["default"])
    assert moved["new"] == []


def test_to_device():
    batch = {"x": t(2), "packed": pack_sequence([t(2), t(1)]), "own": Holder(t(3)), "type": Holder, "s": "s"}
    moved = to_device(batch, "meta")
    assert moved["x"].is_meta
    assert moved["packed"].data.is_meta
    assert moved["packed"].batch_sizes.device.type == "cpu"
    assert moved["own"].x.is_meta
    assert moved["type"] is Holder
    assert moved["s"] == "s"


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (t(5, 2), 5),
        (torch.tensor(3.0), 1),
        ([None, "a", {"x": t(4)}, t(7)], 4),
        (t(0, 3), 0),
        (pack_sequence([t(3), t(2)]), 2),
    ],
)
def test_batch_size_of(batch, size):
    assert batch_size_of(batch) == size


def test_batch_size_of_nothing():
    with pytest.raises(ValueError, match="dict"):
        batch_size_of({"x": 1})


class Refilled:
    """Object with tensors and arrays in attributes and containers, and a reference to itself."""

    def __init__(self):
        self.x, self.parts, self.array, self.own = t(3), {"y": [t(2)]}, np.zeros(2), self

    def to(self, device):
        return self

    def fill(self, value):
        self.x.fill_(value)
        self.parts["y"][0].fill_(value)
        self.array[:] = value

    def values(self):
        return [self.x.tolist(), self.parts["y"][0].tolist(), self.array.tolist()]


class WithClone(Holder):
    def clone(self):
        return WithClone(self.x.clone())


@pytest.mark.parametrize("name", NESTED)
def test_a_clone_is_equal_and_of_the_same_types(name):
    batch = NESTED[name]
    clone = cloned(batch)
    assert same(clone, batch)
    assert not any(map(operator.is_, tensors_of(clone), tensors_of(batch)))


def test_a_clone_survives_its_original():
    objects = [Refilled(), WithClone(t(3)), pack_sequence([t(3), t(2)]), np.zeros(2), bytearray(2)]
    clones = cloned(objects)
    objects[0].fill(7)
    for tensor in (objects[1].x, objects[2].data):
        tensor.fill_(7)
    objects[3][:] = 7
    objects[4][:] = b"77"
    assert clones[0].values() == Refilled().values()
    assert clones[0].own is clones[0]
    assert torch.equal(clones[1].x, t(3))
    assert torch.equal(clones[2].data, pack_sequence([t(3), t(2)]).data)
    assert clones[3].tolist() == [0, 0]
    assert clones[4] == bytearray(2)


def test_a_clone_keeps_what_tensors_and_objects_are_to_each_other():
    x = t(2).requires_grad_()
    pair = cloned((x, x, 2 * x))
    assert pair[0] is pair[1]
    assert pair[0].is_leaf
    assert pair[0].requires_grad
    assert pair[2].grad_fn is not None
    generator, kind, module = (n for n in range(3)), int, torch.nn.Linear(1, 1)
    assert all(map(operator.is_, cloned([generator, kind, module]), [generator, kind, module]))

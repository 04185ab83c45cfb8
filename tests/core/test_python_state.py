"""Python state that code can reach: every change by a step is seen, and put back in place."""

from __future__ import annotations

import array
import builtins
import collections
import csv
import itertools
import multiprocessing
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.core.reachable import reachable
from flatout.core.saved import parts_of
from flatout.core.snapshot import MOST_BYTES_OF_DATA, Snapshot

counter = 0
state = types.SimpleNamespace(position=0)


class Slotted:
    __slots__ = ("position",)

    def __init__(self) -> None:
        self.position = 0


class Counting:
    total = 0

    def __init__(self) -> None:
        self.layers = [types.SimpleNamespace(h=None, position=0) for _ in range(100)]

    def __call__(self) -> None:
        Counting.total += 1
        for layer in self.layers:
            layer.position += 1


def by_global() -> None:
    global counter
    counter += 1
    state.position += 1


def by_helper() -> None:
    by_global()


def closed(held: Any, write: Any) -> Any:
    return lambda: write(held)


def by_nonlocal() -> Any:
    calls = 0

    def step() -> int:
        nonlocal calls
        calls += 1
        return calls

    return step


STEPS: dict[str, Any] = {
    "a global": by_global,
    "a global of another function": by_helper,
    "a variable of a closure": by_nonlocal(),
    "attributes of a class and of objects in a list": Counting(),
    "a slot": closed(Slotted(), lambda held: setattr(held, "position", held.position + 1)),
    "a list": closed([1], lambda held: held.append(2)),
    "an empty dict": closed({}, lambda held: held.update(a=1)),
    "a deque": closed(collections.deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "a set": closed({1}, lambda held: held.add(2)),
    "an ordered dict": closed(collections.OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "a list that forward empties": closed([[1], [2]], lambda held: held.clear()),
    "a NumPy array": closed(np.zeros(3), lambda held: np.add(held, 1, out=held)),
    "a bytearray": closed(bytearray(3), lambda held: held.extend(b"12")),
    "an array": closed(array.array("d", [1.0]), lambda held: held.append(2.0)),
    "a value shared by processes": closed(multiprocessing.Value("i", 0), lambda held: setattr(held, "value", 5)),
    "a plain tensor": closed(torch.zeros(3), lambda held: held.add_(1)),
    "a tensor through NumPy": closed(torch.zeros(3), lambda held: np.add(held.numpy(), 1, out=held.numpy())),
}


def seen(step: Any) -> list[Any]:
    """Return a comparable copy of everything that a step reaches."""
    found: list[Any] = []
    for node in reachable(step):
        if isinstance(node, (torch.Tensor, np.ndarray)):
            found.append(node.tolist())
        elif isinstance(node, (list, set, collections.deque, dict, bytearray, array.array)):
            found.append(repr(node) if not isinstance(node, dict) else [*map(repr, node.items())])
        elif isinstance(node, (types.SimpleNamespace, Slotted)):
            found.append(node.position)
        elif isinstance(node, types.FunctionType) and node.__closure__:
            found.append([repr(cell.cell_contents) for cell in node.__closure__ if not callable(cell.cell_contents)])
        elif hasattr(node, "_obj"):
            found.append(node.value)
    return [*found, counter, state.position, Counting.total]


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_what_a_step_writes_is_put_back(step: Any) -> None:
    before = seen(step)
    snapshot = Snapshot.capture([], code=[step])
    for _ in range(2):
        step()
        assert seen(step) != before
        snapshot.restore()
        assert seen(step) == before


values = st.recursive(
    st.integers(0, 3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        inner.map(lambda value: types.SimpleNamespace(value=value)),
    ),
    max_leaves=12,
)


@given(values, st.integers(0, 1000))
def test_a_change_anywhere_is_seen_and_put_back(value: Any, place: int) -> None:
    """One container or object of a nesting is changed."""
    holders = [node for node in reachable([value]) if isinstance(node, (list, dict, types.SimpleNamespace))]
    parts = [part for node in reachable([value]) for part in parts_of(node, MOST_BYTES_OF_DATA)]
    before = repr(value)
    assert not any(part.changed() for part in parts)
    for holder in holders[place % len(holders) :][:1]:
        if isinstance(holder, list) and holder is not holders[0]:
            holder.append(object())
        elif isinstance(holder, dict):
            holder["new"] = object()
        elif isinstance(holder, types.SimpleNamespace):
            holder.value = object()
        else:
            return
        assert any(part.changed() for part in parts)
    for part in parts:
        part.restore()
    assert repr(value) == before


def test_a_lazy_module_is_lazy_again() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    snapshot = Snapshot.capture([model], code=[model])
    model(torch.ones(2, 4))
    snapshot.restore()
    assert type(model[0]) is nn.LazyLinear
    assert model(torch.ones(2, 5)).shape == (2, 3)


def test_an_unchanged_tensor_keeps_its_version() -> None:
    bank = torch.zeros(3)
    snapshot = Snapshot.capture([], code=[closed(bank, len)])
    snapshot.restore()
    assert bank._version == 0


def test_a_latest_tensor_in_an_attribute_is_no_change() -> None:
    held = types.SimpleNamespace(latest=torch.zeros(1))
    parts = list(parts_of(held, 0))
    held.latest = torch.ones(1)
    assert not any(part.changed() for part in parts)
    held.latest = None
    assert any(part.changed() for part in parts)


def test_names_of_modules_are_left_alone() -> None:
    """Trials replace some of Python's functions while a snapshot is restored."""
    names = vars(builtins)
    snapshot = Snapshot.capture([], code=[closed(names, len), closed(globals(), len)])
    names["of_a_later_import"] = 1
    try:
        snapshot.restore()
        assert "of_a_later_import" in names
    finally:
        del names["of_a_later_import"]


def test_iterators_are_found() -> None:
    numbers = itertools.count()
    assert Snapshot.capture([], code=[closed(numbers, next)]).why_not_repeated
    assert not Snapshot.capture([], code=[closed([1, 2], len)]).why_not_repeated


def test_what_objects_of_c_hold_is_found(tmp_path: Any) -> None:
    with (tmp_path / "rows.csv").open("w") as file:
        for hook in (csv.writer(file).writerow, file.write):
            assert Snapshot.capture([], code=[closed([1], hook)]).why_not_repeated


def test_a_bound_method_of_a_list_is_put_back() -> None:
    notes = [1]
    snapshot = Snapshot.capture([], code=[closed(2, notes.append)])
    notes.append(2)
    snapshot.restore()
    assert notes == [1]

"""Splits of a batch along its samples, and refusals of all other batches."""

import collections
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from flatout.data import batch_size_of, resized, split


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class OnADevice:
    def to(self, device):
        return self


X, Y = torch.arange(24.0).reshape(6, 4), torch.arange(6)


def joined(parts):
    return torch.cat(list(parts))


@pytest.mark.parametrize("sizes", [[6], [3, 3], [4, 2], [1] * 6, [5, 1]])
def test_parts_of_a_pair_are_its_samples_in_order(sizes):
    parts = split((X, Y), sizes)
    assert [batch_size_of(part) for part in parts] == sizes
    assert joined(part[0] for part in parts).equal(X)
    assert joined(part[1] for part in parts).equal(Y)


def test_parts_are_views_and_nothing_is_copied():
    first, second = split(X, [2, 4])
    assert first.data_ptr() == X.data_ptr()
    assert second.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "batch",
    [[X, Y], (X, Y), {"x": X, "y": Y}, Pair(X, Y), collections.OrderedDict(x=X, y=Y), {"in": {"x": X}, "y": [Y]}],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_types(batch):
    for part in split(batch, [3, 3]):
        assert type(part) is type(batch)
        assert batch_size_of(part) == 3


def test_what_is_not_along_the_samples_goes_to_every_part():
    mask, weights, scalar, size, name = torch.ones(4, 4), torch.ones(3), torch.tensor(2.0), (224,) * 6, "sixsix"
    for part in split([X, mask, weights, scalar, size, name, None, 3.5], [2, 4]):
        assert part[1] is mask
        assert part[2] is weights
        assert part[3] is scalar
        assert part[4] == size
        assert part[5:] == [name, None, 3.5]


@pytest.mark.parametrize(
    "entries",
    [
        list("abcdef"),
        tuple("abcdef"),
        [3, 1, 4, 1, 5, 9],
        [{"boxes": torch.ones(i, 4)} for i in range(6)],
        [torch.ones(i + 1) for i in range(6)],
        [np.ones(i) for i in range(6)],
        [(name, None) for name in "abcdef"],
    ],
    ids=["names", "tuple of names", "numbers", "targets", "tensors", "arrays", "pairs"],
)
def test_lists_with_an_entry_for_each_sample_are_sliced(entries):
    first, second = split((X, entries), [2, 4])
    assert first[1] == entries[:2]
    assert type(second[1]) is type(entries)
    assert all(a is b for a, b in zip(second[1], entries[2:], strict=True))


def test_arrays_are_sliced_with_the_tensors():
    first, second = split({"x": X, "n": np.arange(6), "m": np.ones(5)}, [4, 2])
    assert first["n"].tolist() == [0, 1, 2, 3]
    assert second["n"].tolist() == [4, 5]
    assert len(second["m"]) == 5


def test_two_samples_of_two_tensors_are_not_mistaken_for_entries():
    x, masks = torch.ones(2, 3), (torch.zeros(2, 5), torch.ones(2, 5))
    for part in split((x, masks), [1, 1]):
        assert part[0].shape == (1, 3)
        assert [m.shape for m in part[1]] == [(1, 5), (1, 5)]


@pytest.mark.parametrize(
    "batch",
    [
        pack_sequence([torch.ones(3), torch.ones(2)]),
        (X, pack_sequence([torch.ones(3)] * 6)),
        (X, OnADevice()),
        (X, torch.eye(6).to_sparse()),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["packed", "packed beside", "object", "sparse", "nested"],
)
def test_what_cannot_be_taken_apart_is_told(batch):
    size = batch_size_of(batch)
    assert split(batch, [1, size - 1]) is None


# -- other sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 4, 6, 7, 12, 20])
def test_a_resized_batch_has_the_samples_again_from_the_first(samples):
    names = [f"{i}.png" for i in range(6)]
    batch = {"pair": Pair(X, Y), "names": names, "array": np.arange(6), "weights": torch.ones(3), "size": (2, 3)}
    found = resized(batch, samples)
    expected = [i % 6 for i in range(samples)]
    assert batch_size_of(found) == samples
    assert type(found["pair"]) is Pair
    assert found["pair"].x.equal(X[expected])
    assert found["pair"].y.tolist() == expected
    assert found["names"] == [names[i] for i in expected]
    assert found["array"].tolist() == expected
    assert found["weights"].equal(torch.ones(3))
    assert found["size"] == (2, 3)


@pytest.mark.parametrize("samples", [3, 6, 9])
def test_what_cannot_be_taken_apart_cannot_be_resized(samples):
    assert resized((X, OnADevice()), samples) is None
    assert resized((X, pack_sequence([torch.ones(2)] * 6)), samples) is None

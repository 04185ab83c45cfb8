"""Values that flatout keeps on a user's object. Copies lack them, and they are freed with the object."""

import copy
import gc
import pickle
import weakref

import pytest
from torch import nn
from torch.utils.data import DataLoader

from flatout.core.held import held, hold, release


def test_a_value_that_refers_to_its_owner_dies_with_it():
    owner = DataLoader([1])
    hold(owner, "_value", [owner])
    assert held(owner, "_value") == [owner]
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_copies_do_not_have_the_value(copied):
    owner = nn.Linear(1, 1)
    hold(owner, "_value", lambda: None)  # which no pickler accepts
    assert held(copied(owner), "_value") is None


def test_a_released_value_leaves_no_attribute():
    owner = nn.Linear(1, 1)
    before = dict(vars(owner))
    hold(owner, "_value", 1)
    release(owner, "_value")
    release(owner, "_value")
    assert vars(owner) == before

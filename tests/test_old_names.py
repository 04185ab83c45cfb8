"""Old names of public objects still work, with a warning."""

import importlib

import pytest

OLD = {
    ("flatout", "DamagedCheckpoint"): "CorruptCheckpointError",
    ("flatout.optim", "UpdateCutInHalf"): "PartialUpdateError",
    ("flatout.mfu", "range"): "nvtx_range",
}


@pytest.mark.parametrize(("module", "name"), OLD)
def test_an_old_name_is_the_new_object_and_warns(module, name):
    package = importlib.import_module(module)
    new = OLD[module, name]
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(package, name) is getattr(package, new)
    assert name not in package.__all__


def test_a_name_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="never_was"):
        getattr(importlib.import_module("flatout"), "never" + "_was")

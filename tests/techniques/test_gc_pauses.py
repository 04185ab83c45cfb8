"""Garbage collection: at most one long pause in an epoch, and Python's settings restored."""

import gc

import pytest
from torch.nn import functional

import flatout
from tests.jobs import QUICK, make_job


@pytest.fixture(autouse=True)
def as_before():
    gc.unfreeze()
    gc.collect()
    before = (gc.isenabled(), gc.get_threshold(), list(gc.callbacks))
    yield
    gc.unfreeze()
    assert (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)) == before


@pytest.fixture
def collections(clock):
    """Simulated duration of each collection, ``collections.seconds``: 20 ms by default, which is long."""

    def pass_time(phase, _):
        if phase == "stop":
            clock.advance(pass_time.seconds)

    pass_time.seconds = 0.02
    gc.callbacks.insert(0, pass_time)  # runs before the callbacks that read the clock
    yield pass_time
    gc.callbacks.remove(pass_time)


def loader_of(own_loop=True):
    model, loader, opt = make_job()
    form = {} if own_loop else {"optimizer": opt, "loss_fn": functional.cross_entropy}
    return flatout.optimize(model, loader, techniques=QUICK, budget=0, **form).loader


@pytest.fixture
def epoch(collections):
    """Iterator over an epoch in which no object is frozen yet."""
    batches = iter(loader_of())
    next(batches)
    yield batches
    batches.close()


def test_objects_that_outlive_a_full_collection_are_set_aside_until_the_end(epoch):
    next(epoch)
    assert gc.get_freeze_count() == 0  # without a collection there is nothing to do
    gc.collect(1)
    next(epoch)
    assert gc.get_freeze_count() == 0  # no full collection
    gc.collect()
    assert gc.get_freeze_count() == 0  # collections only between steps
    next(epoch)
    assert gc.get_freeze_count() > 1000
    assert len(gc.get_objects()) < 1000
    epoch.close()
    assert gc.get_freeze_count() == 0


def test_garbage_made_later_is_found(epoch):
    class Node:
        alive = 0

        def __init__(self):
            Node.alive += 1
            self.itself = self

        def __del__(self):
            Node.alive -= 1

    gc.collect()
    next(epoch)
    assert gc.get_freeze_count() > 0
    Node()
    gc.collect()
    assert Node.alive == 0


def test_short_collections_are_left_alone(collections, epoch):
    collections.seconds = 0.005
    gc.collect()
    next(epoch)
    assert gc.get_freeze_count() == 0


def test_objects_that_others_froze_before_stay_frozen(epoch):
    gc.freeze()
    gc.collect()
    next(epoch)
    epoch.close()
    assert gc.get_freeze_count() > 0


def test_objects_that_others_froze_later_stay_frozen(epoch):
    gc.collect()
    next(epoch)
    more = [[] for _ in range(1000)]
    gc.freeze()
    epoch.close()
    assert gc.get_freeze_count() > len(more)


def test_loops_within_each_other_end_in_any_order(epoch):
    second = iter(loader_of())
    next(second)
    gc.collect()
    next(epoch)
    next(second)
    assert gc.get_freeze_count() > 0
    second.close()
    assert gc.get_freeze_count() > 0
    epoch.close()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("collections")
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("leave", ["end", "break", "error"])
def test_both_forms_leave_an_epoch_with_nothing_set_aside(own_loop, leave):
    loader = loader_of(own_loop)
    counts = []

    def epoch():
        for i, _ in enumerate(loader):
            counts.append(gc.get_freeze_count())
            if i == 1:
                gc.collect()
            if i == 4 and leave == "break":
                break
            if i == 4 and leave == "error":
                raise RuntimeError

    if leave == "error":
        with pytest.raises(RuntimeError):
            epoch()
    else:
        epoch()
    assert [count > 0 for count in counts[:5]] == [False, False, True, True, True]
    assert gc.get_freeze_count() == 0


def test_the_row_is_kept():
    model, loader, _ = make_job()
    assert flatout.optimize(model, loader, techniques=QUICK, budget=0).report.row("gc_pauses").status == "kept"

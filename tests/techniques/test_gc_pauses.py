"""A long full collection within an epoch is the last long one; afterwards all is as before."""

import gc

import pytest
from torch.nn import functional

import flatout
from flatout import _garbage
from flatout._garbage import LongLived
from tests.jobs import QUICK, make_job


@pytest.fixture(autouse=True)
def every_collection_is_long(monkeypatch):
    """Nothing here depends on how long one takes."""
    gc.unfreeze()
    gc.collect()
    monkeypatch.setattr(_garbage, "WORTH_SECONDS", 1e-9)
    before = (gc.isenabled(), gc.get_threshold(), list(gc.callbacks))
    yield
    gc.unfreeze()
    assert (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)) == before


def test_what_a_full_collection_leaves_is_set_aside_until_the_end():
    with LongLived() as objects:
        objects.between_steps()
        assert gc.get_freeze_count() == 0  # no collection, nothing to do
        gc.collect(1)
        objects.between_steps()
        assert gc.get_freeze_count() == 0  # not a full one
        gc.collect()
        assert gc.get_freeze_count() == 0  # between steps alone
        objects.between_steps()
        assert gc.get_freeze_count() > 1000
        assert len(gc.get_objects()) < 1000
    assert gc.get_freeze_count() == 0


def test_garbage_made_later_is_found():
    class Node:
        alive = 0

        def __init__(self):
            Node.alive += 1
            self.itself = self

        def __del__(self):
            Node.alive -= 1

    with LongLived() as objects:
        gc.collect()
        objects.between_steps()
        Node()
        gc.collect()
        assert Node.alive == 0


def test_short_collections_are_left_alone(monkeypatch):
    monkeypatch.setattr(_garbage, "WORTH_SECONDS", 1e9)
    with LongLived() as objects:
        gc.collect()
        objects.between_steps()
        assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    with LongLived() as objects:
        gc.collect()
        objects.between_steps()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    with LongLived() as objects:
        gc.collect()
        objects.between_steps()
        more = [[] for _ in range(1000)]
        gc.freeze()
    assert gc.get_freeze_count() > len(more)


def test_loops_within_each_other_end_in_any_order():
    first, second = LongLived(), LongLived()
    first.__enter__()
    second.__enter__()
    gc.collect()
    first.between_steps()
    second.between_steps()
    assert gc.get_freeze_count() > 0
    second.__exit__()
    assert gc.get_freeze_count() > 0
    first.__exit__()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("leave", ["end", "break", "error"])
def test_both_forms_leave_an_epoch_with_nothing_set_aside(own_loop, leave):
    model, loader, opt = make_job()
    form = {} if own_loop else {"optimizer": opt, "loss_fn": functional.cross_entropy}
    run = flatout.optimize(model, loader, techniques=QUICK, budget=0, **form)
    counts = []

    def epoch():
        for i, _ in enumerate(run.loader):
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
    row = run.report.row("gc_pauses")
    assert row.status == "kept"

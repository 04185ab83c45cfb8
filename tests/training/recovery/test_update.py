"""Updates that run out of memory: tried again as a whole, left out, or reported as cut in half."""

import pytest
import torch
from torch import nn

import flatout
from flatout.optim import PartialUpdateError
from tests.helpers import Operators, bits
from tests.reasons import reasons
from tests.training.recovery.harness import (
    MemoryEnds,
    assert_same,
    batches_of,
    end_epoch,
    make,
    net,
    picture,
    train,
    waiting,
)
from tests.trap import out_of_memory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

UPDATES = [
    {},
    {"accumulate": 3},
    {"accumulate": 3, "max_grad_norm": 0.05},
]

NEW_STATE = "aten::zeros_like"
"""The operator that begins an optimizer's state."""


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("settings", UPDATES, ids=str)
@pytest.mark.parametrize("failing", [1, 3, 8])
def test_an_update_of_ours_is_tried_again(failing, settings, is_scaled):
    run, twin = (make(optimizer="fused adamw", is_scaled=is_scaled, **settings) for _ in range(2))
    batches = batches_of(*[16] * 5)
    with MemoryEnds(NEW_STATE, failing) as memory:
        losses = train(run, batches)
    assert memory.calls > failing
    assert [bits(loss) for loss in losses] == [bits(loss) for loss in train(twin, batches)]
    assert [bits(p) for p in run.model.parameters()] == [bits(p) for p in twin.model.parameters()]
    assert run.micro_batch is None


class Hungry(torch.optim.SGD):
    """Momentum that is begun entry by entry, and a step that may fail after some of its writes."""

    fails_after = None

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            if len(self.state[p]) == 0:
                self.state[p]["step"] = torch.zeros(())
                self.state[p]["momentum"] = torch.zeros_like(p)
        for i, p in enumerate(parameters):
            if i == self.fails_after:
                raise out_of_memory()
            self.state[p]["momentum"].mul_(0.9).add_(p.grad)
            p.add_(self.state[p]["momentum"], alpha=-self.param_groups[0]["lr"])


def hungry(model):
    return Hungry(model.parameters(), lr=0.1)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("settings", UPDATES, ids=str)
@pytest.mark.parametrize("failing", [1, 4])
def test_an_update_of_anybodys_that_has_written_nothing_is_tried_again(failing, settings, is_scaled):
    run, twin = (make(optimizer=hungry, is_scaled=is_scaled, **settings) for _ in range(2))
    batches = batches_of(*[16] * 5)
    with MemoryEnds(NEW_STATE, failing) as memory:
        train(run, batches)
    train(twin, batches)
    assert memory.calls > failing
    # A clip that is done twice is exact to 1e-6 of the norm, as torch's own is.
    for ours, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert run.micro_batch is None


def test_an_epochs_leftover_is_averaged_once():
    run, twin = (make(optimizer="fused adamw", accumulate=4, is_scaled=True) for _ in range(2))
    batches = batches_of(16, 16, 16)
    for batch in batches:
        run.step(batch)
    with MemoryEnds(NEW_STATE, 1), pytest.warns(RuntimeWarning) as told:
        end_epoch(run)
    (warning,) = told
    assert "update-retried" in reasons(str(warning.message))
    train(twin, batches)
    assert [bits(p) for p in run.model.parameters()] == [bits(p) for p in twin.model.parameters()]


@pytest.mark.parametrize("after", [1, 3])
def test_an_update_cut_in_half_is_an_error(after):
    run = make(optimizer=hungry)
    run.optimizer.fails_after = after
    with pytest.raises(PartialUpdateError, match="Hungry") as caught:
        run.step(batches_of(16)[0])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert waiting(run) == 0


def backward_of(model):
    model(batches_of(16)[0][0]).sum().backward()


def one_bucket_each(cls, model):
    return cls([{"params": [p]} for p in model.parameters()], lr=0.1)


WRITE = "flatout::step_bucket_"


def test_an_update_of_ours_has_its_memory_before_the_first_write():
    model = net()
    optimizer = one_bucket_each(flatout.optim.AdamW, model)
    backward_of(model)
    for step in range(2):
        with Operators() as seen:
            flatout.optim.update(optimizer, inv_scale=0.5, max_grad_norm=0.1)
        first = seen.names.index(WRITE)
        assert seen.names[first:] == [WRITE] * 8
        assert (NEW_STATE in seen.names) == (step == 0)


def test_an_update_of_ours_that_fails_between_buckets_is_cut_in_half():
    model = net()
    optimizer = one_bucket_each(flatout.optim.SGD, model)
    backward_of(model)
    with MemoryEnds(WRITE, 1, 3):
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        with pytest.raises(PartialUpdateError):
            optimizer.step()


@pytest.mark.parametrize("inv_scale", [None, 0.5])
def test_torchs_step_in_the_place_of_ours(inv_scale):
    words = nn.Embedding(5, 3, sparse=True)
    optimizer = flatout.optim.SGD(words.parameters(), lr=0.1)
    words(torch.tensor([1, 2])).sum().backward()
    before = bits(words.weight)
    # Gradients that were scaled would be scaled once more.
    error = torch.OutOfMemoryError if inv_scale is None else PartialUpdateError
    with MemoryEnds("aten::add_", 1) as memory, pytest.raises(error):
        flatout.optim.update(optimizer, inv_scale=inv_scale)
    assert memory.calls == 1
    assert bits(words.weight) == before
    if inv_scale is None:
        flatout.optim.update(optimizer)
        assert bits(words.weight) != before


@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
def test_an_update_that_fails_for_good_is_left_out(optimizer):
    run, twin = make(optimizer=optimizer), make(optimizer=optimizer)
    batch, *rest = batches_of(16, 16, 16)
    before = picture(run)
    with MemoryEnds(NEW_STATE, *range(1, 99)), pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(batch)
    assert "update-left-out" in reasons(str(caught.value))
    assert picture(run) == before
    assert waiting(run) == 0
    train(run, rest)
    train(twin, rest)
    assert_same(run, twin)

"""Steps that run out of memory in forward or backward, repeated in parts with the weights of a whole step."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatout.training.micro_batches import part_sizes
from tests.helpers import Operators
from tests.techniques.harness import graphed, recorder_of
from tests.training.recovery.harness import (
    OPTIMIZERS,
    assert_recovers,
    assert_same,
    batches_of,
    end_epoch,
    make,
    net,
    train,
    trap_of,
)
from tests.trap import Trap, out_of_memory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_is_the_unsplit_one(where, place, optimizer):
    run = assert_recovers(lambda: make(net(place=place), optimizer), batches_of(16, 16, 16), where, 8)
    assert run.micro_batch == 8
    assert trap_of(run).sprung == 1  # later steps use the smaller parts


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("spared", range(4))
def test_finished_batches_of_an_accumulation_keep_what_they_gave(where, spared):
    run = assert_recovers(lambda: make(accumulate=4), batches_of(*[16] * 9), where, 8, spared=spared)
    assert trap_of(run).sprung == 1
    assert trap_of(run).seen == [16] * (spared + 1) + [8, 8] * (9 - spared)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_halves_are_halved_again(where):
    run = assert_recovers(make, batches_of(32, 32), where, 5)
    assert run.micro_batch == 4
    assert trap_of(run).seen == [32, 16, 8, *[4] * 16]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_later_part_is_halved_and_those_before_it_stay(where):
    # The whole step fails. The first and second of three parts pass, and the third one fails.
    run = make()
    trap = trap_of(run)
    trap.arm(where, 4)
    failures = itertools.chain([True, False, True], itertools.repeat(False))
    trap.passes = lambda at, samples: _fail(trap) if at == where and samples > 4 and next(failures) else None
    twin = make()
    batches = batches_of(16)
    train(run, batches)
    train(twin, batches)
    assert trap.seen == [16, 8, 8, 4, 4]
    assert run.micro_batch == 4
    assert_same(run, twin)


def _fail(trap):
    trap.sprung += 1
    raise out_of_memory()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_half_done_backward_of_an_accumulation_fails_twice(place):
    # Layers after the trap have the gradients of the batch, and then of a part, when the other layers fail.
    run = assert_recovers(lambda: make(net(place=place), accumulate=3), batches_of(16, 16, 16), "backward", 3, spared=1)
    assert run.micro_batch == 2


def test_smaller_batches_are_not_taken_apart():
    run = assert_recovers(make, batches_of(16, 8, 5, 16), "forward", 8)
    assert trap_of(run).seen == [16, 8, 8, 8, 5, 8, 8]


def test_an_epochs_leftover_has_its_own_weight():
    assert_recovers(lambda: make(optimizer="fused sgd", accumulate=4), batches_of(16, 16, 16, 16, 16, 7), "backward", 8)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_loss_scaler_and_the_clip_see_the_whole_gradient(optimizer, max_grad_norm):
    run = assert_recovers(
        lambda: make(optimizer=optimizer, accumulate=2, max_grad_norm=max_grad_norm, is_scaled=True),
        batches_of(*[16] * 5),
        "backward",
        8,
        spared=1,
    )
    assert run.scaler.get_scale() == 65536
    assert not run.scaler.last_step_skipped


def test_gradients_take_another_pass_only_for_an_epochs_leftover():
    run = make(optimizer="fused sgd", accumulate=2, is_scaled=True)
    first, second, leftover = batches_of(16, 16, 16)
    with Operators() as full:
        run.step(first)
        run.step(second)
    run.step(leftover)
    with Operators() as rest:
        end_epoch(run)
    assert [seen.names.count("aten::_foreach_mul_") for seen in (full, rest)] == [0, 1]


@pytest.mark.slow
@settings(max_examples=200)
@given(
    depth=st.integers(1, 4),
    data=st.data(),
    sizes=st.lists(st.integers(3, 33), min_size=1, max_size=5),
    accumulate=st.integers(1, 3),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    max_grad_norm=st.sampled_from([None, 0.05, 10.0]),
    is_scaled=st.booleans(),
    where=st.sampled_from(["forward", "backward"]),
)
def test_any_training_recovers(depth, data, sizes, accumulate, optimizer, max_grad_norm, is_scaled, where):
    place = data.draw(st.integers(0, depth - 1))
    limit = data.draw(st.integers(2, max(sizes) - 1))  # two samples show if the loss is a mean over samples
    assert_recovers(
        lambda: make(
            net(depth, place), optimizer, accumulate=accumulate, max_grad_norm=max_grad_norm, is_scaled=is_scaled
        ),
        batches_of(*sizes),
        where,
        limit,
        spared=data.draw(st.integers(0, sum(size > limit for size in sizes) - 1)),
    )


@pytest.mark.parametrize("frozen", [2, 5])
def test_frozen_and_tied_weights(frozen):
    def made():
        model = net(4, 2)
        model[0].weight = model[7].weight  # one leaf before and after the trap
        model[frozen].requires_grad_(False)
        return make(model, "sgd", accumulate=2)

    assert_recovers(made, batches_of(16, 16), "backward", 4, spared=1)


def test_sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.trap, self.head = nn.Embedding(50, 6, sparse=True), Trap(), nn.Linear(6, 3)
            self.double()

        def forward(self, x):
            return self.head(self.trap(self.words(x[:, 0].abs().long())) + self.words(x[:, 1].abs().long()))

    assert_recovers(
        lambda: make(Words(), lambda m: torch.optim.SGD(m.parameters(), lr=0.3), accumulate=2),
        batches_of(16, 16, 16, 16),
        "backward",
        4,
        spared=1,
    )


def test_gradients_that_no_update_uses_up_grow_once():
    def made():
        return make(optimizer=lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1))

    run = assert_recovers(made, batches_of(16, 16), "backward", 8, spared=1)
    twin = made()
    train(twin, batches_of(16, 16))
    torch.testing.assert_close(run.model[-1].weight.grad, twin.model[-1].weight.grad, rtol=1e-9, atol=1e-12)


def test_a_recorded_step_goes_the_same_way():
    run, twin = make(optimizer="fused adamw"), make(optimizer="fused adamw")
    recorder = recorder_of(run)
    candidate = graphed(run, recorder)
    candidate.__enter__()
    candidate.end_warmup()
    batches = batches_of(*[16] * 6, 8, 16)
    for batch in batches[:5]:
        run.step(batch)
    replays = recorder.replayed
    assert replays
    trap_of(run).arm("backward", 8)
    for batch in batches[5:]:
        run.step(batch)
    assert recorder.replayed == replays
    assert recorder.given_back == 1  # the parts can use the memory of graphs
    assert run.micro_batch == 8
    train(twin, batches)
    assert_same(run, twin)


@given(samples=st.integers(1, 300), data=st.data())
def test_parts_are_even_and_no_larger_than_they_may_be(samples, data):
    most = data.draw(st.integers(1, samples))
    sizes = part_sizes(samples, most)
    assert sum(sizes) == samples
    assert max(sizes) <= most
    assert min(sizes) >= 1
    unit = 8 if samples % 8 == 0 and most >= 8 else 1
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= unit
    assert part_sizes(samples, max(sizes)) == sizes

"""Steps that cannot be recovered. The error gives the reason, and the training state is unchanged."""

import pytest
import torch
from torch import nn

import flatout
from tests.jobs import NO_TECHNIQUES
from tests.reasons import reasons
from tests.training.recovery.harness import assert_same, batches_of, make, net, picture, sgd, train, trap_of, waiting
from tests.trap import MESSAGE, Trap

HELP = {"try-8-bit-moments", "try-bf16", "try-checkpointing", "try-smaller-batches"}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("error", [ValueError, MemoryError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_other_errors_pass(where, error):
    run = make()
    mine = error("mine")

    def raised():
        return mine

    trap_of(run).arm(where, 8, error=raised)
    with pytest.raises(error, match="mine"):
        run.step(batches_of(16)[0])
    assert trap_of(run).seen == [16]
    assert run.micro_batch is None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_when_a_sample_does_not_fit_nothing_has_happened(where):
    run, twin = make(net(3, 1, lambda: nn.Dropout(0.2)), "sgd"), make(net(3, 1, lambda: nn.Dropout(0.2)), "sgd")
    torch.manual_seed(5)
    before = picture(run)
    trap_of(run).arm(where, 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(batches_of(16)[0])
    assert picture(run) == before
    assert waiting(run) == 0
    assert run.micro_batch is None
    assert all(p.grad is None for p in run.model.parameters())
    assert MESSAGE in str(caught.value)
    told = reasons(str(caught.value))
    assert {"single-sample-too-large", "memory-of-parameters"} <= told
    assert told & HELP == HELP - {"try-8-bit-moments"}  # moments do not exist yet
    trap_of(run).arm("", 0)
    train(run, batches_of(8, 16))  # training continues
    torch.manual_seed(5)
    train(twin, batches_of(8, 16))
    assert_same(run, twin)


def test_the_batches_before_a_final_error_wait_on_where_that_can_be():
    run, twin = make(accumulate=3), make(accumulate=3)
    first, bad, *rest = batches_of(16, 16, 16, 16)
    run.step(first)
    trap_of(run).arm("forward", 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(bad)
    assert "accumulated-gradients-lost" not in reasons(str(caught.value))
    assert waiting(run) == 1
    trap_of(run).arm("", 0)
    train(run, rest)
    train(twin, [first, *rest])
    assert_same(run, twin)


def test_batches_that_are_lost_with_a_final_error_are_counted_in_it():
    run, twin = make(net(place=1), "sgd", accumulate=3), make(net(place=1), "sgd", accumulate=3)
    first, second, bad, *rest = batches_of(*[16] * 6)
    run.step(first)
    run.step(second)
    trap_of(run).arm("backward", 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"\b2\b") as caught:
        run.step(bad)
    assert "accumulated-gradients-lost" in reasons(str(caught.value))
    assert waiting(run) == 0
    trap_of(run).arm("", 0)
    train(run, rest)
    train(twin, rest)
    assert_same(run, twin)


def test_a_batch_that_cannot_be_taken_apart():
    model = nn.Sequential(Trap(), nn.Linear(6, 3)).double()
    batch = {"x": batches_of(16)[0][0], "words": nn.utils.rnn.pack_sequence([torch.ones(2)] * 16)}
    run = flatout.optimize(
        model,
        [batch],
        sgd(model),
        compute_loss=lambda model, b: model(b["x"]).sum(),
        techniques=NO_TECHNIQUES,
        budget=0,
    )
    trap_of(run).arm("forward", 8)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(batch)
    assert "batch-not-splittable" in reasons(str(caught.value))
    assert run.micro_batch is None


def test_a_model_that_takes_no_parts():
    class Rigid(nn.Module):
        def forward(self, x):
            return x.view(16, 6)

    run = make(nn.Sequential(Rigid(), Trap(), nn.Linear(6, 3)).double(), "sgd")
    trap_of(run).arm("forward", 8)
    before = picture(run)
    with pytest.raises(torch.OutOfMemoryError, match=r"\b8\b.*RuntimeError.*shape") as caught:
        run.step(batches_of(16)[0])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert picture(run) == before
    assert run.micro_batch is None


def test_later_errors_in_parts_pass_as_they_are():
    run = make(optimizer="sgd")
    trap_of(run).arm("forward", 8)
    run.step(batches_of(16)[0])
    before = picture(run)
    trap_of(run).arm("backward", 7, spared=1, error=lambda: ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        run.step(batches_of(16)[0])
    assert picture(run) == before
    assert all(p.grad is None for p in run.model.parameters())
    assert run.micro_batch == 8


def test_hooks_that_use_gradients_in_the_backward():
    run = make(optimizer="sgd")
    run.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    trap_of(run).arm("forward", 8)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(batches_of(16)[0])
    assert "hooks-use-gradients" in reasons(str(caught.value))


def test_an_error_of_loss_weight_passes_and_draws_nothing():
    def weigh(batch):
        torch.rand(1)
        raise KeyError("weight")

    run = make(loss_weight=weigh)
    run.load_state_dict(run.state_dict() | {"micro_batch": 4})
    before = picture(run)
    with pytest.raises(KeyError, match="weight"):
        run.step(batches_of(8)[0])
    assert picture(run) == before

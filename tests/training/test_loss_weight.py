"""Means over tokens: over the batches of an update, and over the batches of an evaluation."""

import copy

import pytest
import torch
from torch.nn import functional

from tests.training.recovery.harness import OPTIMIZERS, batches_of, make, net, train, trap_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

AS_NUMBER = lambda batch: int((batch[1] != -100).sum())  # noqa: E731
AS_TENSOR = lambda batch: (batch[1] != -100).sum()  # noqa: E731


def tokens_of(*lengths):
    """Return batches of 8 samples. Only the first targets of each batch count."""
    batches = batches_of(*[8] * len(lengths))
    for (_, y), length in zip(batches, lengths, strict=True):
        y[length:] = -100
    return batches


def token_mean(model, batches):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return functional.cross_entropy(model(x), y)


def expected(optimizer, batches, accumulate, max_grad_norm=None):
    """Return the weights of a plain loop whose updates are means over all tokens of their batches."""
    model = net()
    build, _ = OPTIMIZERS[optimizer]
    opt = build(model)
    for first in range(0, len(batches), accumulate):
        opt.zero_grad()
        token_mean(model, batches[first : first + accumulate]).backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        opt.step()
    return list(model.parameters())


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("weight", [AS_NUMBER, AS_TENSOR], ids=["number", "tensor"])
def test_an_update_is_the_mean_over_the_tokens_of_its_batches(weight, optimizer, is_scaled, max_grad_norm):
    batches = tokens_of(3, 8, 1, 5, 2, 7, 4)  # the last update has one batch
    settings = {"accumulate": 3, "max_grad_norm": max_grad_norm, "is_scaled": is_scaled}
    run = make(optimizer=optimizer, loss_weight=weight, **settings)
    train(run, batches)
    for ours, theirs in zip(run.model.parameters(), expected(optimizer, batches, 3, max_grad_norm), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(0, 4, 6), (4, 0, 6), (4, 6, 0)])
@pytest.mark.parametrize("weight", [AS_NUMBER, AS_TENSOR], ids=["number", "tensor"])
def test_batches_without_tokens_do_not_count(weight, lengths):
    batches = tokens_of(*lengths)
    run = make(optimizer="sgd", loss_weight=weight, accumulate=3)
    train(run, batches)
    for ours, theirs in zip(run.model.parameters(), expected("sgd", batches, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_update_without_tokens_changes_nothing():
    run = make(optimizer="sgd", loss_weight=AS_TENSOR, accumulate=2)
    before = copy.deepcopy(run.model.state_dict())
    train(run, tokens_of(0, 0))
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_parts_and_batches_are_weighted_together():
    batches = tokens_of(3, 8, 1, 5)
    run = make(optimizer="sgd", loss_weight=AS_TENSOR, accumulate=2)
    trap_of(run).arm("backward", 3)
    train(run, batches)
    assert run.micro_batch is not None
    for ours, theirs in zip(run.model.parameters(), expected("sgd", batches, 2), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_in_the_middle_of_an_update_keeps_its_weights():
    batches = tokens_of(3, 8, 1, 5)
    run, other = (make(optimizer="sgd", loss_weight=AS_TENSOR, accumulate=4) for _ in range(2))
    for batch in batches[:2]:
        run.step(batch)
    other.load_state_dict(copy.deepcopy(run.state_dict()))
    for batch in batches[2:]:
        other.step(batch)
    for ours, theirs in zip(other.model.parameters(), expected("sgd", batches, 4), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 4, 24])
@pytest.mark.parametrize("weight", [AS_NUMBER, AS_TENSOR], ids=["number", "tensor"])
def test_an_evaluation_does_not_depend_on_the_batch_size(weight, size):
    whole = [torch.cat(parts) for parts in zip(*tokens_of(3, 0, 7), strict=True)]
    run = make(loss_weight=weight)
    batches = list(zip(*(part.split(size) for part in whole), strict=True))
    found = run.evaluate(batches, metrics={"share": lambda output, batch: (batch[1] != -100).double().mean()})
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(token_mean(run.model, [whole])), rel=1e-5)
    assert found["share"] == pytest.approx(10 / 24, rel=1e-5)

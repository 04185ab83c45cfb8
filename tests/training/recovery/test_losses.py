"""Losses of parts, weighted so that they add up to the loss of the whole batch."""

import pytest
import torch
from torch import nn

import flatout
from tests.reasons import reasons
from tests.training.recovery.harness import assert_recovers, batches_of, make, net, picture, trap_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def tokens_of(*lengths):
    """Return batches of 8 samples. Only the first targets of each batch count."""
    batches = []
    for (x, y), length in zip(batches_of(*[8] * len(lengths)), lengths, strict=True):
        y[length:] = -100
        batches.append((x, y))
    return batches


@pytest.mark.parametrize(
    "weight",
    [lambda batch: int((batch[1] != -100).sum()), lambda batch: (batch[1] != -100).sum()],
    ids=["number", "tensor"],
)
def test_token_means(weight):
    # The last parts of the first batch have weight 0, because their own mean is 0 / 0.
    run = assert_recovers(lambda: make(loss_weight=weight, accumulate=2), tokens_of(3, 5, 8, 1), "backward", 2)
    assert run.micro_batch == 2


def test_token_means_without_their_weights_are_not_computed_in_parts():
    run = make()
    trap_of(run).arm("forward", 4)
    before = picture(run)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(tokens_of(5)[0])
    assert "not-mean-over-samples" in reasons(str(caught.value))
    assert picture(run) == before
    assert run.micro_batch is None


def test_sums_are_summed():
    loss = nn.CrossEntropyLoss(reduction="sum")
    assert_recovers(lambda: make(optimizer="sgd", loss_fn=loss), batches_of(16, 7), "forward", 3)


@pytest.mark.parametrize("loss_weight", [3, "samples"])
def test_a_loss_weight_has_to_be_callable(loss_weight):
    with pytest.raises(TypeError, match="loss_weight"):
        make(loss_weight=loss_weight)


def test_a_loss_weight_needs_an_optimizer():
    with pytest.raises(ValueError, match="loss_weight"):
        flatout.optimize(net(), batches_of(8), loss_weight=len, budget=0)

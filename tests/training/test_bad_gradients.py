"""Messages that name the first gradient with an inf or NaN, or explain why they name none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatout
import flatout.optim as fo
from flatout.training.non_finite import first_bad_gradient
from tests.jobs import NO_TECHNIQUES, job_of
from tests.reasons import reasons

BATCH = (torch.ones(4, 8), torch.ones(4, 3))


class Job:
    """Training whose loss and gradients become infinite or NaN on request."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = fo.SGD, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
        self.excess = 0.0
        optimizer = make(self.model.parameters(), lr=0.01)
        techniques = {name: choice for name, choice in NO_TECHNIQUES.items() if name not in how}
        self.run = flatout.optimize(self.model, [BATCH], optimizer, self.loss, techniques=techniques, budget=0, **how)
        for _ in range(3):
            self.run.step(BATCH)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - y).square().mean() + self.excess

    def spoil(self, name: str, value: float, count: int) -> None:
        def hook(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[:count] = value
            return grad

        self.model.get_parameter(name).register_hook(hook)

    def warning(self) -> str:
        self.excess = math.nan
        with pytest.warns(RuntimeWarning) as told:
            self.run.step(BATCH)
        return str(told[0].message)

    def error(self) -> str:
        self.run.stop_after_bad = 1
        with pytest.raises(FloatingPointError) as stopped:
            self.run.step(BATCH)
        return str(stopped.value)


def named(sentence: str) -> tuple[str, int, int, str]:
    """Parse a sentence, and return parameter, number of bad elements, number of elements and shape."""
    assert "gradient-not-finite" in reasons(sentence)
    found = re.search(r"the gradient of (\S+) .* (\d+) of (\d+) elements, shape (.*)$", sentence)
    assert found is not None
    return found[1], int(found[2]), int(found[3]), found[4]


@pytest.mark.parametrize("make", [fo.SGD, torch.optim.SGD])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_warning_names_the_first_in_the_order_of_parameters(make, accumulate):
    job = Job(make, accumulate=accumulate)
    job.spoil("1.weight", math.inf, 7)
    job.spoil("0.bias", math.nan, 3)
    assert named(job.warning()) == ("0.bias", 3, 4, "(4,)")


def test_the_error_of_skipped_steps_names_it_too():
    job = Job(precision="fp16", max_grad_norm=1.0)
    job.spoil("1.weight", -math.inf, 2)
    assert named(job.error()) == ("1.weight", 2, 12, "(3, 4)")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_error_of_bad_losses_names_it_too():
    job = Job()
    job.spoil("0.weight", math.nan, 5)
    job.excess = math.nan
    assert named(job.error()) == ("0.weight", 5, 32, "(4, 8)")


def test_finite_gradients_of_a_bad_loss_are_called_finite():
    assert "gradients-finite" in reasons(Job().warning())


@pytest.mark.parametrize(("make", "code"), [(fo.SGD, "gradient-not-finite"), (torch.optim.SGD, "gradients-clipped")])
def test_gradients_that_clipping_has_spoiled_are_not_blamed(make, code):
    """Clipping by a NaN norm multiplies every gradient by NaN, except in a lazy update."""
    job = Job(make, max_grad_norm=1.0)
    job.spoil("1.bias", math.nan, 1)
    warning = job.warning()
    assert code in reasons(warning)
    if code == "gradient-not-finite":
        assert named(warning)[0] == "1.bias"


def test_gradients_that_are_gone_are_not_known():
    job = Job()
    job.run.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    assert "gradients-none" in reasons(job.warning())


def test_gradients_of_an_earlier_step_are_not_known():
    model = nn.Linear(8, 3)
    job = job_of(model, [], torch.optim.SGD(model.parameters(), lr=0.01))
    model(torch.ones(4, 8)).sum().mul(math.nan).backward()
    assert "gradients-overwritten" in reasons(first_bad_gradient(job, 7, now=9))
    assert "gradient-not-finite" in reasons(first_bad_gradient(job, 9, now=9))


def test_a_sparse_gradient_is_named():
    model = nn.Embedding(9, 3, sparse=True)
    job = job_of(model, [], torch.optim.SGD(model.parameters(), lr=0.01))
    model(torch.tensor([2, 2, 5])).sum().mul(math.inf).backward()
    assert named(first_bad_gradient(job, 1, now=1)) == ("weight", 6, 27, "(9, 3)")

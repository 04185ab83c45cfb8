"""Steps whose FLOPs are counted train as other steps do, although counting runs the user's code once more."""

import pytest
import torch
from torch import nn

import flatout
from tests.jobs import NO_TECHNIQUES


def test_counting_a_new_shape_in_mid_training_leaves_what_the_loss_reaches(clock):
    """The last batch of an epoch has another shape."""
    noise, critic = torch.Generator().manual_seed(1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(critic.parameters(), 0.5)
    steps = []

    def compute_loss(model, x):
        steps.append(len(x))
        optimizer.zero_grad()
        critic(x[:, :1] + torch.rand(1, generator=noise)).mean().backward()
        optimizer.step()
        return model(x).square().mean()

    def made():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        return model, torch.optim.SGD(model.parameters(), 0.1), [torch.ones(4, 4), torch.ones(4, 4), torch.ones(2, 4)]

    model, own, batches = made()
    run = flatout.optimize(model, batches[:2], own, compute_loss=compute_loss, budget=0)
    clock.advance(1000)  # seconds of training, of which counting may take a share
    before = noise.get_state(), critic.weight.item()
    steps.clear()
    run.step(batches[2])
    assert steps == [2]  # the call that counts is put back in the list, too
    after = noise.get_state(), critic.weight.item()
    noise.set_state(before[0])
    with torch.no_grad():
        critic.weight.fill_(before[1])
    compute_loss(model, batches[2])
    assert (noise.get_state() == after[0]).all()
    assert critic.weight.item() == after[1]


def test_a_model_that_cannot_be_counted_is_tuned_without_an_mfu(clock):
    """FLOPs are counted under a dispatch mode."""

    class Uncountable(nn.Linear):
        def forward(self, x):
            if torch._C._len_torch_dispatch_stack():
                raise ValueError("under a dispatch mode")
            return super().forward(x)

    model = Uncountable(4, 1)
    clock.slow_down(model)
    batches, optimizer = [torch.ones(4, 4)] * 2, torch.optim.SGD(model.parameters(), 0.1)
    settings = {"compute_loss": lambda model, x: model(x).square().mean(), "techniques": NO_TECHNIQUES, "budget": 100}
    with pytest.warns(RuntimeWarning, match="under a dispatch mode"):
        run = flatout.optimize(model, batches, optimizer, **settings)
    assert run.report.summary.after.mfu is None
    assert str(run.report)
    assert torch.isfinite(run.step(batches[0]))

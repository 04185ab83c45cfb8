"""Side effects of a repeated step: buffers, random numbers, counts, the learning rate, memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.helpers import bits
from tests.training.recovery.harness import assert_recovers, batches_of, make, net, sgd, train, trap_of
from tests.trap import Trap

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_batchnorm_counts_once_and_knows_the_samples_once():
    def norm():
        return nn.BatchNorm1d(6)

    run, twin = make(net(3, 1, norm)), make(net(3, 1, norm))
    batch = batches_of(16)[0]
    before = [bits(b) for b in twin.model.buffers()]
    trap_of(run).arm("forward", 8)
    run.step(batch)
    twin.step(batch)
    ours, theirs = ([m for m in r.model.modules() if isinstance(m, nn.BatchNorm1d)] for r in (run, twin))
    for mine, other in zip(ours, theirs, strict=True):
        assert int(mine.num_batches_tracked) == int(other.num_batches_tracked) == 1
    assert before != [bits(b) for b in twin.model.buffers()]
    # Layers before the trap keep the statistics of the whole batch.
    assert bits(ours[0].running_mean) == bits(theirs[0].running_mean)
    assert bits(ours[0].running_var) == bits(theirs[0].running_var)


def test_statistics_behind_the_failure_are_the_means_over_the_parts():
    model = nn.Sequential(Trap(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    run = make(model, "sgd")
    x, y = batches_of(24)[0]
    trap_of(run).arm("forward", 10)
    for step in (1, 2):
        start = model[1].running_mean.clone()
        run.step((x, y))
        torch.testing.assert_close(model[1].running_mean, 0.9 * start + 0.1 * x.mean(0), rtol=1e-9, atol=1e-12)
        assert int(model[1].num_batches_tracked) == step
    variances = torch.stack([part.var(0) for part in x.split(8)]).mean(0)
    torch.testing.assert_close(model[1].running_var, 0.81 + 0.19 * variances, rtol=1e-9, atol=1e-12)


class Remembers(nn.Module):
    """Module with all kinds of buffers: infinite, replaced in each forward, growing, of other dtypes, None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("replaced", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.replaced = 0.5 * self.replaced + 0.5 * x.detach().mean(0)
        self.last = x.detach()[:, 0]
        self.calls += 1
        return x


def test_buffers_of_every_make():
    def remembering():
        torch.manual_seed(0)
        return make(nn.Sequential(Trap(), Remembers(), nn.Linear(6, 3)).double(), "sgd")

    run = assert_recovers(remembering, batches_of(16, 16), "forward", 8)
    kept, twin = run.model[1], remembering()
    train(twin, batches_of(16, 16))
    torch.testing.assert_close(kept.replaced, twin.model[1].replaced)
    assert bits(kept.mask) == bits(twin.model[1].mask)
    assert int(kept.calls) == 2
    assert len(kept.last) == 8
    assert kept.nothing is None


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        self.drawn.append(torch.rand(()).item())
        return x


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_first_part_draws_what_the_batch_drew(where):
    run = make(nn.Sequential(Draws(), Trap(), nn.Linear(6, 3)).double(), "sgd")
    trap_of(run).arm(where, 4)
    torch.manual_seed(7)
    expected = torch.rand(4).tolist()
    torch.manual_seed(7)
    run.model[0].drawn.clear()
    run.step(batches_of(16)[0])
    assert run.model[0].drawn == [expected[0]] * 3 + expected[1:]


def test_a_step_is_counted_once_with_its_samples():
    run = make(accumulate=2)
    trap_of(run).arm("backward", 3)
    train(run, batches_of(16, 16, 16))
    assert run.stats.total.steps == 3
    assert run.stats.total.samples == 48


def test_the_scheduler_steps_once_per_update():
    model = net()
    opt = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    run = make(model, lambda _: opt, scheduler=scheduler, accumulate=2)
    trap_of(run).arm("forward", 4)
    train(run, batches_of(16, 16, 16))
    assert opt.param_groups[0]["lr"] == pytest.approx(0.3 * 0.25)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_failed_graph_is_gone_before_parts_are_tried(where, monkeypatch):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.activations = []

        def forward(self, x):
            assert not any(reference() is not None for reference in self.activations)
            y = x * 2
            self.activations.append(weakref.ref(y))
            return y * y

    run = make(nn.Sequential(nn.Linear(6, 6), Holds(), Trap(), nn.Linear(6, 3)).double(), "sgd")
    trap_of(run).arm(where, 4)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    try:
        run.model[1].activations.clear()
        run.step(batches_of(16)[0])
    finally:
        gc.enable()
    assert len(run.model[1].activations) == 6


def test_gradients_end_up_in_the_tensors_that_somebody_holds():
    run = make(accumulate=2)
    batches = batches_of(16, 16)
    run.step(batches[0])
    held = [p.grad for p in run.model.parameters()]
    trap_of(run).arm("backward", 4)
    run.step(batches[1])
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), held, strict=True))

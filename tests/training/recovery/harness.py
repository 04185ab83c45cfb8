"""Trainings with a trap, and memory that runs out during the update."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import flatout
from tests.helpers import bits
from tests.jobs import NO_TECHNIQUES
from tests.trap import Trap, out_of_memory

FUSED = NO_TECHNIQUES | {"fused_optimizer": True}


def net(depth=3, place=1, extra=None):
    """Return layers with a trap before the layer at ``place``, and ``extra`` after each layer."""
    torch.manual_seed(0)
    layers = []
    for i in range(depth):
        if i == place:
            layers.append(Trap())
        layers += [nn.Linear(6, 6), *([] if extra is None else [extra()]), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


def trap_of(run):
    return next(m for m in run.model.modules() if isinstance(m, Trap))


def batches_of(*sizes):
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {
    "sgd": (sgd, NO_TECHNIQUES),
    "adamw": (adamw, NO_TECHNIQUES),
    "fused sgd": (sgd, FUSED),
    "fused adamw": (adamw, FUSED),
}


def make(model=None, optimizer="adamw", loss_fn=functional.cross_entropy, *, is_scaled=False, **settings):
    """Return a run in float64.

    Args:
        model: ``net()`` by default.
        optimizer: key of ``OPTIMIZERS``, or a function of the model.
        loss_fn: as for ``optimize``.
        is_scaled: True to scale gradients as in fp16. The model still computes in float64, because autocast does not
            change doubles.
        settings: further arguments of ``optimize``.
    """
    model = net() if model is None else model
    build, techniques = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else (optimizer, NO_TECHNIQUES)
    batches = batches_of(16)
    if is_scaled:
        model.float()
        batches = [(x.float(), y) for x, y in batches]
        techniques = techniques | {"precision": "fp16"}
    run = flatout.optimize(model, batches, build(model), loss_fn, techniques=techniques, budget=0, **settings)
    model.double()
    return run


def end_epoch(run):
    """Update with the pending batches, as run.loader does before an epoch begins."""
    next(iter(run.loader))


def train(run, batches):
    losses = [run.step(batch) for batch in batches]
    end_epoch(run)
    return losses


def waiting(run):
    """Return the number of batches whose gradients are pending."""
    return run.state_dict()["job"]["pending"]


def picture(run):
    return [bits(t) for t in (*run.model.parameters(), *run.model.buffers())], bits(torch.get_rng_state())


def assert_same(run, twin):
    for (name, ours), theirs in zip(run.model.named_parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def assert_recovers(make_run, batches, *armed, **how):
    """Train with and without a trap, and compare weights and losses. Return the run with the trap."""
    run, twin = make_run(), make_run()
    trap_of(run).arm(*armed, **how)
    losses, expected = train(run, batches), train(twin, batches)
    assert trap_of(run).sprung
    assert not trap_of(twin).sprung
    assert_same(run, twin)
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours.dim() == 0
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert waiting(run) == waiting(twin) == 0
    return run


class MemoryEnds(TorchDispatchMode):
    """Mode in which some calls of one operator run out of memory.

    Args:
        operator: name of the operator, such as ``"aten::zeros_like"``.
        failing: numbers of the calls that fail, counted from 1.

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self, operator, *failing):
        super().__init__()
        self.operator, self.failing, self.calls = operator, failing, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == self.operator:
            self.calls += 1
            if self.calls in self.failing:
                raise out_of_memory()
        return func(*args, **(kwargs or {}))

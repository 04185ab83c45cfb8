"""Training scripts as functions. Each returns its modules and optimizers after some updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Trained:
    """Objects of a training after its last update."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    drawn: Tensor
    """Random numbers drawn after the last update."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the training."""
        found = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, Tensor)]
        return [*found, self.drawn]


Script = Callable[[int, Callable[[nn.Module], object]], Trained]
"""``script(updates, watch)`` trains, and calls ``watch`` with each module before the first update."""


def net(dropout: float = 0.0) -> nn.Sequential:
    """Return a small network with batch statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 3)
    )  # fmt: skip


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Return a shuffled loader of three batches."""
    x = torch.linspace(-1, 1, 24 * 8).view(24, 8)
    return DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=8, shuffle=True)


def batches(updates: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a number of batches, epoch by epoch."""
    made = 0
    while True:
        for x, y in loader():  # torch keeps the iterator alive, but not the loader
            if made == updates:
                return
            made += 1
            yield x, y


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Train a classifier by the shortest loop."""
    for x, y in batches(updates):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def plain(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train with dropout, momentum and an evaluation between."""
    model = net(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch(model)
    for i, (x, y) in enumerate(batches(updates)):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return Trained([model], [optimizer], torch.rand(3))


def clipped(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train with a schedule and clipped gradients, which are not set to None."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    watch(model)
    for x, y in batches(updates):
        functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
    return Trained([model], [optimizer], torch.rand(3))


def accumulating(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train with two batches an update."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watch(model)
    for i, (x, y) in enumerate(batches(2 * updates), 1):
        (functional.cross_entropy(model(x), y) / 2).backward()
        if i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return Trained([model], [optimizer], torch.rand(3))


def adversarial(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train two networks against each other."""
    torch.manual_seed(0)
    makes, judges = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 1))
    for_makes, for_judges = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (makes, judges))
    watch(makes)
    watch(judges)
    for x, _ in batches(updates):
        for_judges.zero_grad()
        made = makes(torch.randn(8, 4))
        (judges(made.detach()).mean() - judges(x).mean()).backward()
        for_judges.step()
        for_makes.zero_grad()
        (-judges(made).mean()).backward()
        for_makes.step()
    return Trained([makes, judges], [for_makes, for_judges], torch.rand(3))


def in_16_bits(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train under the script's own autocast, with a loss scaler."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch(model)
    for x, y in batches(updates):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return Trained([model], [optimizer], torch.rand(3))


def by_closure(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train by LBFGS, which calls the model itself."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    watch(model)
    for x, y in batches(updates):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return Trained([model], [optimizer], torch.rand(3))


def penalized(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train with a penalty on gradients, which are differentiated again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watch(model)
    for x, _ in batches(updates):
        optimizer.zero_grad()
        x.requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + slope.square().sum()).backward()
        optimizer.step()
    return Trained([model], [optimizer], torch.rand(3))


class TwoHeads(nn.Module):
    """Model that calls two networks."""

    def __init__(self) -> None:
        super().__init__()
        self.acts, self.judges = (
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs)) for outputs in (3, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.acts(x), self.judges(x)


def in_two_backwards(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Step one optimizer between two backwards of one call."""
    torch.manual_seed(0)
    model = TwoHeads()
    for_acts, for_judges = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model.acts, model.judges))
    watch(model)
    for x, y in batches(updates):
        for_acts.zero_grad()
        for_judges.zero_grad()
        acts, judged = model(x)
        functional.cross_entropy(acts, y).backward()
        for_acts.step()
        judged.square().mean().backward()
        for_judges.step()
    return Trained([model], [for_acts, for_judges], torch.rand(3))


def averaged(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Keep an average of the weights, and a schedule, by hooks of the optimizer."""
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    optimizer.register_step_pre_hook(lambda *_: schedule.step())
    watch(model)
    train(model, optimizer, updates)
    return Trained([model, average], [optimizer], torch.tensor(schedule.last_epoch + torch.rand(1).item()))


def frozen_later(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train in eval mode after two updates."""
    model = net(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch(model)
    for i, (x, y) in enumerate(batches(updates)):
        if i == 2:
            model.eval()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return Trained([model], [optimizer], torch.rand(3))


class Remembering(nn.Module):
    """Network whose calls depend on earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.state, self.calls = nn.Linear(8, 3), torch.zeros(3), 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x) + self.state
        self.state, self.calls = out.detach().mean(0), self.calls + 1
        return out


def remembering(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train a model that keeps a state in Python."""
    torch.manual_seed(0)
    model = Remembering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch(model)
    train(model, optimizer, updates)
    return Trained([model], [optimizer], model.state)


class Checkpointed(nn.Module):
    """Network whose backward computes its body again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=True)
        return self.head(hidden)


def checkpointed(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train with reentrant checkpoints."""
    torch.manual_seed(0)
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch(model)
    train(model, optimizer, updates)
    return Trained([model], [optimizer], torch.rand(3))


class Output(dict):  # type: ignore[type-arg]
    """Mapping that cannot be updated as a whole, as the outputs of Hugging Face's models."""

    def update(self, *_: object, **__: object) -> None:
        raise RuntimeError("not allowed")


class WithLoss(nn.Module):
    """Network that returns its loss and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        out = self.body(x)
        return Output(loss=functional.cross_entropy(out, labels), logits=out)


def with_loss_inside(updates: int, watch: Callable[[nn.Module], object]) -> Trained:
    """Train a model that returns a mapping with its loss, which is scaled in place."""
    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch(model)
    for x, y in batches(updates):
        optimizer.zero_grad()
        output = model(x, labels=y)
        assert type(output) is Output
        loss = output["loss"]
        loss *= 0.5
        assert output["loss"] is loss
        loss.backward()
        optimizer.step()
    return Trained([model], [optimizer], torch.rand(3))


SCRIPTS: list[Script] = [
    plain,
    clipped,
    accumulating,
    adversarial,
    in_16_bits,
    by_closure,
    in_two_backwards,
    averaged,
    frozen_later,
    remembering,
    checkpointed,
    with_loss_inside,
]
LEFT_ALONE: list[Script] = [penalized]
"""Trainings whose model must not be tuned."""

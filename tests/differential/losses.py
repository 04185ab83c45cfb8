"""Losses as users write them: functions, modules, and closures over other modules, with all kinds of side effects."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.differential.models import CLASSES

Unpack = Callable[[Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Loss:
    """Arguments of ``optimize``, and every object that the arguments reach and a step may change."""

    arguments: dict[str, Any]
    objects: tuple[Any, ...] = ()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), target)


class Weighted(nn.Module):
    """Loss module with class weights and a count of calls in buffers, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5] + [1.0] * 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(output.float() * self.temperature, target, self.weights[: output.shape[1]])


def _plain(unpack: Unpack) -> Loss:
    return Loss({"loss_fn": cross_entropy})


def _module(unpack: Unpack) -> Loss:
    loss = Weighted()
    return Loss({"loss_fn": loss}, (loss,))


def _closure(unpack: Unpack) -> Loss:
    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        return cross_entropy(model(x), y)

    return Loss({"compute_loss": compute_loss})


def _teacher(unpack: Unpack) -> Loss:
    """Distill from a teacher in train mode. Each loss updates the statistics of the teacher's BatchNorm."""
    teacher = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1)).requires_grad_(False)

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        output = model(x).float()
        dense = (x.to_dense() if x.is_sparse else x).float().flatten(1).mean(1, keepdim=True)
        wanted = teacher(dense).squeeze(1) if len(x) > 1 else dense.squeeze(1)
        return cross_entropy(output, y) + 0.1 * (output.mean(1) - wanted).square().mean()

    return Loss({"compute_loss": compute_loss}, (teacher,))


def _gan(unpack: Unpack) -> Loss:
    """Train a critic inside the loss, by its own optimizer."""
    critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(critic.parameters(), 0.01)

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        output = model(x).float()
        made, real = output.mean(1, keepdim=True), y.float().unsqueeze(1)
        optimizer.zero_grad()
        (functional.softplus(-critic(real)) + functional.softplus(critic(made.detach()))).mean().backward()
        optimizer.step()
        return cross_entropy(output, y) + 0.1 * functional.softplus(-critic(made)).mean()

    return Loss({"compute_loss": compute_loss}, (critic, optimizer))


def _pops(unpack: Unpack) -> Loss:
    """Pop the labels from the batch, as much Hugging Face code does."""

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        y = batch.pop("y")
        return cross_entropy(model(batch["x"]), y)

    return Loss({"compute_loss": compute_loss})


def _in_place(unpack: Unpack) -> Loss:
    """Change the tensors of the batch."""

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        if x.is_floating_point() and not x.is_sparse:
            x.mul_(1.25).add_(0.125)
        y.add_(1).remainder_(CLASSES)
        return cross_entropy(model(x), y)

    return Loss({"compute_loss": compute_loss})


def _random(unpack: Unpack) -> Loss:
    """Draw from torch's generator, and from one in the closure."""
    generator = torch.Generator().manual_seed(9)

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        output = model(x).float()
        noise = torch.randn(output.shape) + torch.randn(output.shape, generator=generator)
        return cross_entropy(output + 0.05 * noise, y)

    return Loss({"compute_loss": compute_loss}, (generator,))


def _host_random(unpack: Unpack) -> Loss:
    """Draw random numbers from Python and NumPy. Mixup and layer drop do this."""

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        return cross_entropy(model(x), y) * (random.random() + np.random.rand())

    return Loss({"compute_loss": compute_loss})


def _bank(unpack: Unpack) -> Loss:
    """Compare with earlier outputs, in a plain tensor and at a position of the closure."""
    bank, position = torch.zeros(6, CLASSES), 0

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal position
        x, y = unpack(batch)
        output = model(x).float()
        loss = cross_entropy(output[:, :CLASSES] - 0.1 * bank.mean(0), y)
        bank[position % len(bank)] = output.detach()[:, :CLASSES].mean(0)
        position += 1
        return loss

    return Loss({"compute_loss": compute_loss}, (compute_loss,))


def _list(unpack: Unpack) -> Loss:
    """Keep the losses of a step with their graphs, print, and count the calls in a function's attribute."""
    kept: list[Tensor] = []

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        kept.clear()
        output = model(x)
        kept.append(cross_entropy(output, y))
        kept.append(0.01 * output.float().square().mean())
        compute_loss.calls += 1  # type: ignore[attr-defined]
        print("call", compute_loss.calls)  # type: ignore[attr-defined]
        return torch.stack(kept).sum()

    compute_loss.calls = 0  # type: ignore[attr-defined]
    return Loss({"compute_loss": compute_loss}, (compute_loss,))


def _contrastive(unpack: Unpack) -> Loss:
    """Compare each sample with all others of its batch."""

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = unpack(batch)
        output = functional.normalize(model(x).float(), dim=1)
        return cross_entropy(output, y) + 0.1 * torch.logsumexp(output @ output.T, 1).mean()

    return Loss({"compute_loss": compute_loss})


def _of_the_model(unpack: Unpack) -> Loss:
    return Loss({})


def _ignoring(unpack: Unpack) -> Loss:
    """Average over the samples that count. Parts of a batch then need weights."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        total = functional.cross_entropy(output.float(), target, ignore_index=2, reduction="sum")
        return total / (target != 2).sum().clamp(min=1)

    return Loss({"loss_fn": loss_fn, "loss_weight": lambda batch: (batch[1] != 2).sum()})


LOSSES: dict[str, tuple[Callable[[Unpack], Loss], str]] = {
    "function": (_plain, "pairs"),
    "module": (_module, "pairs"),
    "closure": (_closure, "any"),
    "teacher": (_teacher, "any"),
    "gan": (_gan, "any"),
    "pops labels": (_pops, "mappings"),
    "in place": (_in_place, "any"),
    "random": (_random, "any"),
    "host random": (_host_random, "any"),
    "bank": (_bank, "any"),
    "list": (_list, "any"),
    "contrastive": (_contrastive, "any"),
    "of the model": (_of_the_model, "keywords"),
    "ignoring some": (_ignoring, "pairs"),
}
"""Maker of each loss, and the required kind of batch."""

WRITING = ("pops labels", "in place")
"""Losses that write to their batch."""

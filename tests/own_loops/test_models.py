"""Models as users have them: tied, frozen, with dicts as outputs, compiled, several at once."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from tests.helpers import bits
from tests.jobs import QUICK, Net, make_data, train
from tests.own_loops.harness import BF16, EXACT, assert_alike, make, plain, sgd

EACH_PRECISION = pytest.mark.parametrize(("techniques", "rel"), [(EXACT, 1e-4), (BF16, 0.05)], ids=["fp32", "bf16"])


class Tied(nn.Module):
    """Model whose input and output share a weight, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


@EACH_PRECISION
def test_tied_weights_stay_tied(techniques: dict[str, Any], rel: float) -> None:
    def make_tied() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        tokens = torch.randint(0, 20, (64,))
        return Tied(), DataLoader(TensorDataset(tokens, tokens.roll(1)), batch_size=16)

    def loop(model: nn.Module, loader: Any) -> list[float]:
        losses = train(model, loader, sgd(model))
        assert model.head.weight is model.embed.weight
        assert len(list(model.parameters())) == 3
        return losses

    assert_alike(make_tied, loop, techniques, rel=rel)


@EACH_PRECISION
def test_frozen_parameters_stay_frozen(techniques: dict[str, Any], rel: float) -> None:
    def make_frozen() -> tuple[nn.Module, Any]:
        model, loader = make()
        model.body[0].requires_grad_(False)
        model.body[1].eval()
        return model, loader

    def loop(model: nn.Module, loader: Any) -> list[float]:
        flags = [p.requires_grad for p in model.parameters()]
        assert flags == [False, False, True, True, True, True]
        assert not model.body[1].training
        frozen = bits(model.body[0].weight), bits(model.body[1].running_mean)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        losses = train(model, loader, optimizer)
        assert (bits(model.body[0].weight), bits(model.body[1].running_mean)) == frozen
        assert model.body[0].weight.grad is None
        return losses

    assert_alike(make_frozen, loop, techniques, rel=rel)


@EACH_PRECISION
def test_models_that_return_dicts(techniques: dict[str, Any], rel: float) -> None:
    class Several(Net):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            logits = super().forward(x)
            return {"logits": logits, "aux": [logits.square().mean()], "count": len(x), "none": None}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        output = model(x)
        assert output["count"] == len(x)
        assert output["none"] is None
        return functional.cross_entropy(output["logits"], y) + 0.1 * output["aux"][0]

    def loop(model: nn.Module, loader: Any) -> list[float]:
        return train(model, loader, sgd(model), compute_loss=loss)

    assert_alike(functools.partial(make, Several), loop, techniques, rel=rel)


def test_two_networks_that_train_each_other() -> None:
    """Each network of a GAN is tuned by its own call. Both share a loader."""

    def gan(tune: bool) -> list[float]:
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        loader: Any = DataLoader(make_data(), batch_size=16, shuffle=True)
        if tune:
            critic, loader = flatout.optimize(critic, loader, techniques=EXACT, budget=0)
            generator, _ = flatout.optimize(generator, [torch.randn(16, 4)], techniques=QUICK, budget=0)
        optimizers = [torch.optim.Adam(net.parameters(), 0.01) for net in (generator, critic)]
        losses = []
        torch.manual_seed(7)
        for x, _ in loader:
            noise = torch.randn(len(x), 4)
            optimizers[1].zero_grad()
            loss = (
                functional.softplus(-critic(x)).mean() + functional.softplus(critic(generator(noise).detach())).mean()
            )
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            fooled = functional.softplus(-critic(generator(noise))).mean()
            fooled.backward()
            optimizers[0].step()
            losses += [loss.item(), fooled.item()]
        return losses

    assert gan(tune=True) == pytest.approx(gan(tune=False), rel=1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_and_after(when: str) -> None:
    """``optimize`` receives neither the schedulers nor the optimizer."""

    def loop(tune: bool) -> tuple[list[float], float]:
        model, loader = make()
        if tune and when == "after":
            model, loader = flatout.optimize(model, loader, techniques=EXACT, budget=0)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if tune and when == "before":
            model, loader = flatout.optimize(model, loader, techniques=EXACT, budget=0)
        losses: list[float] = []
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns if a scheduler does not see the steps
            for _ in range(2):
                losses += train(model, loader, optimizer)
                scheduler.step()
        return losses, optimizer.param_groups[0]["lr"]

    ours, theirs = loop(tune=True), loop(tune=False)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1] == theirs[1] == 0.0125


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_model_that_comes_compiled(way: str) -> None:
    def make_compiled() -> tuple[nn.Module, Any]:
        torch._dynamo.reset()
        model, loader = make()
        if way == "wrapped":
            return torch.compile(model, backend="eager"), loader
        model.compile(backend="eager")
        return model, loader

    assert_alike(make_compiled, plain, EXACT, rel=1e-4)
    if way == "in place":
        assert_alike(make_compiled, plain, BF16, rel=0.05)
        return
    with pytest.raises(ValueError, match="precision"):
        assert_alike(make_compiled, plain, BF16, rel=0.05)

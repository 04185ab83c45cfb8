"""Losses that take their batch apart or write to it: trials, repeated steps and the user get the original batch."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.core.batches import with_own_containers
from tests.helpers import bits
from tests.jobs import QUICK, train, tried


@dataclass
class Pair:
    x: torch.Tensor
    rest: dict


class Data:
    """Batch with ``.to`` and with attributes that change, as in PyTorch Geometric."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device, non_blocking=False):
        return Data(self.x.to(device), self.y.to(device))


def pop_from_dict(model, batch):
    labels = batch.pop("y")
    return functional.cross_entropy(model(**batch), labels)


def pop_from_list(model, batch):
    labels = batch.pop()
    return functional.cross_entropy(model(*batch), labels)


def pop_nested(model, batch):
    labels = batch[1].pop("deep").pop()
    return functional.cross_entropy(model(batch[0]), labels)


def pop_from_dataclass(model, batch):
    x, batch.x = batch.x, None
    return functional.cross_entropy(model(x), batch.rest.pop("y"))


KINDS = {
    "dict": (lambda x, y: {"input": x, "y": y}, pop_from_dict),
    "UserDict": (lambda x, y: UserDict({"input": x, "y": y}), pop_from_dict),
    "list": (lambda x, y: [x, y], pop_from_list),
    "nested": (lambda x, y: (x, {"deep": [y]}), pop_nested),
    "dataclass": (lambda x, y: Pair(x, {"y": y}), pop_from_dataclass),
}


def make_job(make):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(4)]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, [make(x, y) for x, y in batches], torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("budget", [0, 1])  # trials repeat batches
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_may_pop_from_its_batch(kind, budget):
    make, compute_loss = KINDS[kind]
    expected = train(*make_job(make), compute_loss=compute_loss)
    model, batches, opt = make_job(make)
    how = {"techniques": QUICK | {"fused_optimizer": False}, "budget": budget}
    run = flatout.optimize(model, batches, opt, compute_loss=compute_loss, **how)
    assert [run.step(batch).item() for batch in run.loader] == expected
    assert [run.step(batch).item() for batch in run.loader]  # a second epoch of the same batches


def test_own_containers_are_shallow_copies():
    x, data = torch.zeros(2), Data(torch.zeros(1), torch.zeros(1))
    batch = {"list": [x, (x, {"x": x})], "data": data}
    copied = with_own_containers(batch)
    assert copied["list"][1][1]["x"] is x
    assert copied["data"].x is data.x
    copied["list"][1][1].clear()
    copied["list"].clear()
    del copied["data"].x
    assert batch == {"list": [x, (x, {"x": x})], "data": data}
    assert data.x is not None


def doubles(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x.mul_(2)), y)


def doubles_unseen(model, batch):
    x, y = batch
    x.data.mul_(2)
    return functional.cross_entropy(model(x), y)


class Doubles(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("compute_loss", [doubles, doubles_unseen, None])
def test_a_loss_may_write_to_its_batch(compute_loss):
    expected = train(*make_job(lambda x, y: (x, y)), compute_loss=compute_loss or doubles)
    model, batches, opt = make_job(lambda x, y: (x, y))
    arguments = {"compute_loss": compute_loss}
    if compute_loss is None:
        model.__class__, arguments = Doubles, {"loss_fn": functional.cross_entropy}
    before = [bits(x) for x, _ in batches]
    run = tried(model, batches, opt, **arguments)
    assert [bits(x) for x, _ in batches] == before
    assert [run.step(batch).item() for batch in run.loader] == expected
    assert [bits(x) for x, _ in batches] == before


def test_what_repeats_a_step_finds_the_batch_as_it_came():
    model, batches, opt = make_job(lambda x, y: {"input": x, "y": y})
    seen, fitting = [], 8

    def compute_loss(model, batch):
        x, y = batch.pop("input").mul_(2), batch.pop("y")
        seen.append(x.abs().sum().item())
        if len(x) > fitting:
            raise torch.OutOfMemoryError("pretended")
        return functional.cross_entropy(model(x), y)

    run = flatout.optimize(
        model,
        batches,
        opt,
        compute_loss=compute_loss,
        loss_weight=lambda batch: len(batch.pop("y")),
        techniques=QUICK | {"batch_size": False},
        budget=0,
    )
    seen.clear()
    fitting = 4
    with pytest.warns(RuntimeWarning, match=r"\b4\b"):
        run.step(batches[0])
    assert run.micro_batch == 4
    assert seen[0] == pytest.approx(sum(seen[1:]))
    assert set(batches[0]) == {"input", "y"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_first_bad_and_metrics_find_the_batch_as_it_came():
    model, batches, opt = make_job(lambda x, y: {"input": x, "y": y})
    run = flatout.optimize(model, batches, opt, compute_loss=pop_from_dict, techniques=QUICK, budget=0)
    accuracy = run.evaluate(batches, {"labels": lambda output, batch: batch["y"].float().mean()})
    assert accuracy["labels"] > 0
    run.stop_after_bad = 1
    batch = batches[0] | {"input": torch.full((8, 4), float("nan"))}
    with pytest.raises(FloatingPointError):
        run.step(batch)

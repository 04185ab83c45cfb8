"""A wrapped model counts its own steps, whatever loop trains it; nothing else about it changes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from flatout.mfu import MfuCounter, count_flops


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, steps: int = 3, batch: int = 5, accumulate: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            loss = model(torch.randn(batch, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_wrapped_model_counts_its_steps_samples_and_flops() -> None:
    counter, model = MfuCounter(peak_flops=1e30, device="cpu"), mlp()
    assert counter.wrap(model) is model
    losses = train(model)
    assert (counter.steps, counter.samples, counter.total.tokens) == (3, 15, 0)
    expected = 3 * count_flops(mlp(), torch.randn(5, 8)).total
    assert counter.total.flops_per_second * counter.total.seconds == pytest.approx(expected)
    assert counter.hfu == pytest.approx(counter.mfu)
    assert losses == train(mlp())  # bit for bit


def test_every_forward_and_backward_is_a_step_with_accumulation_too() -> None:
    counter, model = MfuCounter(1.0, device="cpu", phases_every=1), mlp()
    counter.wrap(model)
    train(model, steps=2, accumulate=3)
    assert counter.steps == 6
    assert counter.phases is not None
    assert min(counter.phases.forward, counter.phases.backward, counter.phases.update) > 0


def test_forwards_before_one_backward_are_one_step() -> None:
    counter, model = MfuCounter(2.0, device="cpu"), mlp()
    counter.wrap(model)
    (model(torch.ones(3, 8)).sum() - model(torch.ones(4, 8)).sum()).backward()
    assert (counter.steps, counter.samples) == (1, 7)
    assert counter.total.flops_per_second * counter.total.seconds == pytest.approx(4.0)


def test_tokens_are_counted_where_there_are_token_ids() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), nn.Embedding(10, 4)
    counter.wrap(model)
    model(torch.zeros(3, 7, dtype=torch.long)).sum().backward()
    assert (counter.samples, counter.total.tokens) == (3, 21)
    assert counter.tokens_per_second == pytest.approx(21 / counter.total.seconds)


def test_only_training_counts() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    with torch.no_grad():
        model(torch.ones(2, 8))
    model.eval()
    model(torch.ones(2, 8))
    assert counter.steps == 0
    model.train()
    train(model, steps=1)
    assert counter.steps == 1


def test_an_update_of_another_model_is_not_its_own() -> None:
    counter, model, other = MfuCounter(1.0, device="cpu", phases_every=1), mlp(), mlp()
    counter.wrap(model)
    model(torch.ones(2, 8)).sum().backward()
    train(other, steps=1)
    assert counter.total.phases is not None
    assert counter.total.phases.update == 0


def test_a_forward_that_fails_is_no_step() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(2, 9))
    assert counter.steps == 0
    assert train(model, steps=2) == train(mlp(), steps=2)
    assert counter.steps == 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, twice: bool = False) -> dict[str, Any]:
        return {"a": self.a(x), "rest": [self.b(x), None], "twice": twice}


def test_models_with_several_outputs_are_counted() -> None:
    counter, model = MfuCounter(device="cpu", phases_every=1), TwoHeads()
    counter.wrap(model)
    for _ in range(2):
        output = model(torch.ones(3, 8), twice=True)
        (output["a"].sum() + output["rest"][0].sum()).backward()
    assert counter.steps == 2
    assert counter.phases is not None
    assert counter.phases.backward > 0


@pytest.mark.parametrize("compiled", ["in place", "around"])
def test_compiled_models_are_counted(compiled: str) -> None:
    model: Any = mlp()
    if compiled == "in place":
        model.compile(backend="eager", fullgraph=True)
    else:
        model = torch.compile(model, backend="eager", fullgraph=True)
    counter = MfuCounter(device="cpu")
    counter.wrap(model)
    losses = train(model)
    assert counter.steps == 3
    assert counter.flops_per_second is not None
    assert losses == pytest.approx(train(mlp()))


def test_compiling_afterwards_goes_on_counting() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    model.compile(backend="eager", fullgraph=True)
    train(model)
    assert counter.steps == 3


def test_copies_and_pickles_are_plain() -> None:
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    keys = list(model.state_dict())
    counter.wrap(model)
    assert list(model.state_dict()) == keys
    assert isinstance(model, nn.Sequential)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert type(twin) is nn.Sequential
        train(twin, steps=1)
    assert counter.steps == 0
    assert repr(model) == repr(mlp())


def test_it_says_what_it_cannot_wrap() -> None:
    counter, model = MfuCounter(device="cpu"), mlp()
    counter.wrap(model)
    with pytest.raises(ValueError, match="this Sequential is wrapped already"):
        counter.wrap(model)
    with pytest.raises(TypeError, match="ScriptModule"):
        counter.wrap(torch.jit.trace(mlp(), torch.ones(2, 8)))


def test_a_model_that_is_gone_leaves_nothing_behind() -> None:
    gc.collect()  # models of other tests
    hooks = len(_global_optimizer_post_hooks)
    counter, model = MfuCounter(1.0, device="cpu"), mlp()
    counter.wrap(model)
    train(model)
    assert len(_global_optimizer_post_hooks) == hooks + 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(_global_optimizer_post_hooks) == hooks
    assert counter.steps >= 2


def test_flops_that_cannot_be_counted_are_unknown_and_training_goes_on() -> None:
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("not now")
            return super().forward(x)

    counter, model = MfuCounter(peak_flops=1e12, device="cpu"), Moody(8, 8)
    counter.wrap(model)
    with pytest.warns(RuntimeWarning, match="could not be counted, its MFU is not known: RuntimeError: not now"):
        train(model)
    assert counter.steps == 3
    assert counter.mfu is None

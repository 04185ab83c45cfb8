"""Price of switches that make torch compile existing code again, for scripts that compile their own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.core.torch_state import compiled_frames, script_compiles
from flatout.techniques import REGISTRY, StepTechnique
from tests.clock import Clock
from tests.jobs import only
from tests.reasons import reasons

RECOMPILING = {"cpu_threads", "tf32", "precision", "channels_last"}
"""Techniques that change a state that torch's guards check."""


def compiled(function: Any) -> Any:
    """Compile by Dynamo alone, whose guards are those of every backend."""
    return torch.compile(function, backend="eager")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def in_place() -> nn.Module:
    model = net()
    model.compile(backend="eager")
    return model


class ByFunction(nn.Module):
    """Model whose forward calls a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.activate = compiled(lambda x: x.sigmoid() * x)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.activate(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch.compile(model)": lambda: compiled(net()),
    "model.compile()": in_place,
    "compiled function": ByFunction,
}


def tuned(model: nn.Module, clock: Clock, **settings: Any) -> flatout.Run:
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 4, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"techniques": only(*RECOMPILING, "fused_optimizer"), "budget": 20, "expected_steps": 10**5} | settings

    def loss(output: Tensor, y: Tensor) -> Tensor:
        clock.advance(0.01)
        return functional.cross_entropy(output, y)

    return flatout.optimize(model, DataLoader(data, batch_size=16), optimizer, loss, **settings)


def test_the_techniques_that_change_a_guard() -> None:
    marked = {t.name for t in REGISTRY if isinstance(t, StepTechnique) and t.recompiles}
    assert marked == RECOMPILING


@pytest.mark.parametrize("name", MODELS)
def test_tuning_compiles_no_code_of_the_script_again(name: str, clock: Clock) -> None:
    frames = {}
    few = ("fused_optimizer",)
    for techniques in (few, few, (*RECOMPILING, *few)):  # the first run in a process may compile one frame more
        torch._dynamo.reset()
        before = compiled_frames()
        run = tuned(MODELS[name](), clock, techniques=only(*techniques))
        frames[len(techniques)] = compiled_frames() - before
        run.undo()
    assert frames[1] == frames[5] > 0
    row = run.report.row("cpu_threads")
    assert row.status == "not tried"
    assert "setup-exceeds-budget" in reasons(row)


def test_a_large_budget_pays_for_the_recompilation(clock: Clock) -> None:
    run = tuned(MODELS["model.compile()"](), clock, techniques=only("cpu_threads", "fused_optimizer"), budget=400)
    assert run.report.row("cpu_threads").trials


def test_code_that_flatout_compiled_does_not_count_as_the_scripts(clock: Clock, compiler: None) -> None:
    model = net()
    run = tuned(model, clock, techniques=only("fused_optimizer") | {"compile": True})
    assert not script_compiles()
    run.undo()
    again = tuned(model, clock)
    assert again.report.row("cpu_threads").trials

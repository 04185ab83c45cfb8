"""Modes of torch.compile and TorchScript on a GPU: equal training, and no kept tensor that the next step overwrites."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from flatout.techniques.calls import RoutedCall
from flatout.techniques.compile import why_no_compiler

ALONE = {"precision": False, "workers": False, "in_memory": False, "fused_optimizer": False}


def make() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)).cuda()
    return model, [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(4)]


@pytest.fixture
def compiler() -> None:
    reason = why_no_compiler(torch.device("cuda"))
    if reason:
        pytest.skip(reason)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_compiled_training_is_the_plain_training(mode: str) -> None:
    model, batches = make()
    twin = copy.deepcopy(model)
    opts = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, twin)]
    run = flatout.optimize(
        model, batches, opts[0], functional.cross_entropy, techniques=ALONE | {"compile": mode}, budget=0
    )
    losses = [run.step(batch) for _ in range(5) for batch in run.loader]
    call = run._job.objective.compiled
    assert isinstance(call, RoutedCall)
    assert (call.plain_calls, call.failure) == (0, "")
    expected = []
    for _ in range(5):
        for x, y in batches:
            opts[1].zero_grad()
            loss = functional.cross_entropy(twin(x.cuda()), y.cuda())
            loss.backward()
            opts[1].step()
            expected.append(loss.item())
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-2)
    run.undo()
    assert run._job.objective.compiled is None


@pytest.mark.usefixtures("compiler")
def test_outputs_of_graphs_outlive_the_next_call() -> None:
    model, batches = make()
    model.eval()
    flatout.optimize(model, batches, techniques={"compile": "reduce-overhead", "precision": False}, budget=0)
    inputs = [x.cuda() for x, _ in batches]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            outputs = [model(x) for x in inputs]
            for x, output in zip(inputs, outputs, strict=True):
                torch.testing.assert_close(output, model._call_impl(x), rtol=1e-3, atol=1e-3)
    call: Any = model._compiled_call_impl
    assert call.plain_calls == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchscript_trains_like_the_plain_model(kind: str, precision: str) -> None:
    model, batches = make()
    twin = copy.deepcopy(model)
    opts = [torch.optim.SGD(m.parameters(), 0.05) for m in (model, twin)]
    techniques = ALONE | {"torchscript": kind, "precision": False if precision == "fp32" else precision}
    run = flatout.optimize(model, batches, opts[0], functional.cross_entropy, techniques=techniques, budget=0)
    row = next(row for row in run.report.rows if row.technique == "torchscript")
    assert row.status == "kept", row.why
    losses = [run.step(batch).item() for batch in run.loader]
    expected = []
    for x, y in batches:
        opts[1].zero_grad()
        loss = functional.cross_entropy(twin(x.cuda()), y.cuda())
        loss.backward()
        opts[1].step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 3e-2)


def test_other_draws_of_dropout_are_not_held_against_a_candidate() -> None:
    """Dropout draws from the GPU's generator, so the comparison must seed this generator too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 10)).cuda()
    batches = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(4)]
    run = flatout.optimize(
        model,
        batches,
        torch.optim.SGD(model.parameters(), 0.05),
        functional.cross_entropy,
        techniques=ALONE | {"torchscript": False},
        expected_steps=10**9,
    )
    row = next(row for row in run.report.rows if row.technique == "compile")
    assert not any("differ by" in trial.failure for trial in row.trials)

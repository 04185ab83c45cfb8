"""Verdict on an MFU: comparison with models of the same family, and the limit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.mfu import Phases, TensorCores, count_flops, measured_peak_flops
from flatout.mfu.verdict import CONVOLUTIONAL, DENSE, RECURRENT, TRANSFORMER, Family, family_of, judge
from tests.jobs import only
from tests.reasons import reasons

LIMITS = {
    "clocks-throttled",
    "host-bound",
    "launch-bound",
    "loader-bound",
    "no-limit-found",
    "small-or-memory-bound-kernels",
    "transfer-bound",
}


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize(
    ("model", "x", "family"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8), DENSE),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4)), torch.ones(2, 3, 8, 8), CONVOLUTIONAL),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.ones(2, 5, 16), TRANSFORMER),
        (
            nn.Sequential(nn.Conv1d(4, 16, 1), nn.TransformerEncoderLayer(16, 2, 32)),  # patches of a ViT
            torch.ones(2, 4, 16),
            TRANSFORMER,
        ),
        (Rnn(), torch.ones(2, 5, 8), RECURRENT),
    ],
    ids=["mlp", "cnn", "transformer", "patches", "lstm"],
)  # fmt: skip
def test_families_are_told_by_what_the_flops_go_to(model: nn.Module, x: torch.Tensor, family: Family) -> None:
    assert family_of(count_flops(model, x).by_op) is family


def test_nothing_counted_is_of_no_family() -> None:
    assert family_of({}) is DENSE


def phases(**seconds: float) -> Phases:
    return Phases(**dict.fromkeys(("loader_wait", "h2d", "forward", "backward", "update", "host_idle"), 0.0) | seconds)


@pytest.mark.parametrize(
    ("where", "code", "fact"),
    [
        ({"stall_fraction": 0.34}, "loader-bound", "34 %"),
        ({"phases": phases(forward=0.6, h2d=0.4)}, "transfer-bound", "40 %"),
        ({"phases": phases(forward=0.8, host_idle=0.2)}, "host-bound", "20 %"),
        ({"phases": phases(forward=1.0), "stall_fraction": 0.5}, "small-or-memory-bound-kernels", ""),
        ({"throttle": ("power limit",), "utilization": 1.0}, "clocks-throttled", "power limit"),
        ({"utilization": 0.5}, "launch-bound", ""),
        ({"utilization": 0.99}, "small-or-memory-bound-kernels", ""),
    ],
)
def test_the_limit_is_named(where: dict[str, Any], code: str, fact: str) -> None:
    limit = judge(0.12, "the peak", TRANSFORMER, **where).limit
    assert reasons(limit) & LIMITS == {code}
    assert fact in limit


def test_an_mfu_within_the_usual_range_stands_out_in_nothing() -> None:
    told = str(judge(0.45, "the data sheet's peak in bf16", TRANSFORMER, utilization=0.99, stall_fraction=0.01))
    assert re.match(r"MFU 45\.0 % .*the data sheet's peak in bf16.*\b40 .*\b60 %.*PaLM", told)
    assert re.search(r"NVML.* 99 %", told)
    assert reasons(told) & LIMITS == {"no-limit-found"}


@pytest.mark.parametrize(
    ("active", "needed", "code"),
    [
        (0.8, 0.45, {"count-too-low"}),
        (0.45, 0.8, {"count-too-high"}),
        (0.7, 0.45, set()),
        (0.45, 0.7, set()),
        (0.09, 0.01, set()),
        (0.8, None, set()),
    ],
)
def test_a_wide_gap_to_the_activity_of_tensor_cores_names_a_wrong_count(
    active: float, needed: float | None, code: set[str]
) -> None:
    verdict = replace(judge(0.4, "the peak", TRANSFORMER), tensor_cores=TensorCores(active, needed))
    assert reasons(str(verdict)) & {"count-too-low", "count-too-high"} == code
    assert f"{100 * active:.1f} %" in str(verdict)
    assert bool(verdict.doubt) is bool(code)
    assert str(verdict.tensor_cores) in repr(verdict)


def test_the_measured_peak_stands_beside_the_data_sheets() -> None:
    verdict = replace(judge(0.4, "the data sheet's peak", TRANSFORMER), of_measured=0.5)
    assert re.match(r"MFU 40\.0 % of the data sheet's peak, 50\.0 % of ", str(verdict))


def test_ranges_of_gpus_are_not_held_against_a_cpu() -> None:
    told = str(judge(0.3, "the fastest matrix product here", CONVOLUTIONAL))
    assert "30.0 %" in told
    assert CONVOLUTIONAL.source not in told
    assert "NVML" not in told


def test_an_unknown_mfu_is_not_spoken_of() -> None:
    verdict = judge(None, "", DENSE, stall_fraction=0.2)
    assert "MFU" not in str(verdict)
    assert reasons(str(verdict)) & LIMITS == {"loader-bound"}
    assert str(judge(None, "", DENSE)) == ""


def test_a_run_passes_judgement() -> None:
    assert measured_peak_flops("cpu") is not None  # stored, because a slow machine cannot measure it within the budget
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    batches = [(torch.randn(32, 64), torch.randn(32, 1))] * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    techniques = only("fused_optimizer")
    run = flatout.optimize(model, batches, optimizer, nn.functional.mse_loss, techniques=techniques, budget=1)
    assert run.report.summary.after is not None
    assert run.report.summary.after.mfu is not None
    assert run.report.summary.verdict.startswith("MFU ")
    run.fit(2, progress=False)
    assert run.stats.mfu is not None
    assert run.verdict.mfu == pytest.approx(run.stats.mfu)
    assert run.verdict.family is DENSE
    assert run.verdict.utilization is None
    flops = count_flops(lambda x, y: nn.functional.mse_loss(model(x), y).backward(), *batches[0]).total
    assert run.stats.total.flops_per_second * run.stats.total.seconds == pytest.approx(8 * flops)


def test_a_model_of_complex_numbers_has_a_peak_too() -> None:
    model = nn.Linear(4, 1, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(2, 4, dtype=torch.complex64)] * 2
    run = flatout.optimize(model, batches, optimizer, compute_loss=lambda m, x: m(x).abs().mean(), budget=0)
    run.step(batches[0])
    assert run.stats.steps == 1

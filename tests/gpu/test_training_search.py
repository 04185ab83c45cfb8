"""Trainings after trials on the device, which equal plain torch for any decision of the trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import flatout
from tests.gpu.kinds import BATCH, SAMPLES
from tests.gpu.trainings import Setup, check_same, nothing_left, optimize, train, train_plainly, undo
from tests.jobs import NO_TECHNIQUES

ALL = {name: None for name in NO_TECHNIQUES if name not in ("compile", "torchscript")}
"""Techniques for trials, without ``compile`` and ``torchscript``, whose Triton and NVRTC code compiles slowly."""

FOR_LAUNCHES = {"fused_optimizer": None, "cuda_graph": None, "precision": False, "tf32": False}


def check_after_trials(setup: Setup, techniques: Mapping[str, Any], budget: float) -> flatout.Report:
    """Train after trials of these techniques, and compare with plain torch in the precision that the trials chose."""
    with nothing_left():
        run = optimize(replace(setup, precision="auto"), techniques, budget=budget, plan=None)
        report, decisions = run.report, run.plan.decisions
        ours = train(run, setup.epochs)
        undo(run, setup)
        del run
    chosen = replace(setup, precision=decisions.get("precision", "tf32" if decisions.get("tf32") else "fp32"))
    check_same(ours, train_plainly(chosen), chosen)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ["perceptron", "convolutions", "gpt"])
def test_all_techniques(kind: str, optimizer: str) -> None:
    check_after_trials(Setup(kind, optimizer, max_grad_norm=0.5), ALL, budget=10)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_graph_is_tried_whatever_became_of_the_fused_optimizer(optimizer: str) -> None:
    report = check_after_trials(Setup("perceptron", optimizer), FOR_LAUNCHES, budget=60)
    (trial, *_) = report.row("cuda_graph").trials
    assert not trial.failure


def test_a_training_in_larger_batches() -> None:
    setup = Setup("perceptron")
    with nothing_left():
        run = optimize(setup, ALL | {"workers": 0, "in_memory": False}, batch_size=2 * BATCH, budget=6, plan=None)
        ours = train(run, 2)
        undo(run, setup)
        del run
    assert len(ours.losses) == 2 * math.ceil(SAMPLES / (2 * BATCH))
    assert bool(ours.losses.isfinite().all())

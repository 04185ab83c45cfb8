"""Equality of ``run.step`` and plain torch on the CPU, for each precision and each form of the update."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.gpu.kinds import KINDS
from tests.gpu.trainings import OPTIMIZERS, Setup, check

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
FUSED: dict[str, Any] = {"fused_optimizer": True}
GRAPHED = FUSED | {"cuda_graph": True}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_with_clipping_and_a_schedule(kind: str, precision: str) -> None:
    check(Setup(kind, precision=precision, max_grad_norm=0.5, has_schedule=True), GRAPHED)


@pytest.mark.parametrize("techniques", [{}, FUSED], ids=["torch", "fused"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_accumulated_gradients(precision: str, techniques: dict[str, Any]) -> None:
    check(Setup("perceptron", "adamw", precision, accumulate=4, max_grad_norm=0.5, has_schedule=True), techniques)


@pytest.mark.parametrize("techniques", [{}, FUSED, GRAPHED], ids=["torch", "fused", "graph"])
def test_updates_that_the_loss_scaler_skips(techniques: dict[str, Any]) -> None:
    """The recommender's fp16 gradients overflow until the loss scale is an eighth of the initial scale."""
    scaler = check(Setup("recommender", "adamw", "fp16"), techniques).scaler
    assert scaler is not None
    assert scaler["scale"] < torch.amp.GradScaler("cpu").get_scale()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("techniques", "accumulate"), [({}, 1), (FUSED, 1), (GRAPHED, 1), ({}, 2), (FUSED, 2)], ids=str
)
@pytest.mark.parametrize(
    ("kind", "optimizer", "precision"), list(product(KINDS, OPTIMIZERS, ("fp32", "bf16", "fp16"))), ids=str
)
def test_all(kind: str, optimizer: str, precision: str, techniques: dict[str, Any], accumulate: int) -> None:
    check(Setup(kind, optimizer, precision, accumulate), techniques)

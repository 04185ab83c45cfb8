"""Techniques, each forced alone or with others. The training still equals plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.trainings import Setup, check

GPT, CONVOLUTIONS, RECOMMENDER = Setup("gpt"), Setup("convolutions"), Setup("recommender")
GPT_IN_16_BITS = Setup("gpt", precision="bf16")

GRAPHED = {"fused_optimizer": True, "cuda_graph": True}


def _name(techniques: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in techniques.items())


ALONE: list[tuple[Setup, dict[str, Any]]] = [
    (CONVOLUTIONS, {"channels_last": True}),
    (CONVOLUTIONS, {"cudnn_benchmark": True}),
    (CONVOLUTIONS, {"fused_optimizer": True}),
    (CONVOLUTIONS, {"compile": "default"}),
    (CONVOLUTIONS, {"in_memory": True}),
    (CONVOLUTIONS, {"workers": 0}),
    (CONVOLUTIONS, {"workers": 2}),
    (GPT, {"sdpa_backend": "math"}),
    (GPT, {"sdpa_backend": "mem_efficient"}),
    (GPT_IN_16_BITS, {"sdpa_backend": "flash"}),
    (GPT_IN_16_BITS, {"sdpa_backend": "cudnn"}),
    (GPT, {"activation_checkpointing": True}),
    (GPT, GRAPHED),
    (RECOMMENDER, {"torchscript": "script"}),
    (RECOMMENDER, {"torchscript": "trace"}),
]


@pytest.mark.parametrize(("setup", "techniques"), ALONE, ids=[_name(techniques) for _, techniques in ALONE])
def test_alone(setup: Setup, techniques: dict[str, Any]) -> None:
    check(setup, techniques)


IN_COMPANY: list[tuple[Setup, dict[str, Any]]] = [
    (
        Setup("convolutions", "adamw", "bf16", max_grad_norm=0.5, has_schedule=True),
        GRAPHED | {"channels_last": True, "cudnn_benchmark": True, "in_memory": True},
    ),
    (
        Setup("convolutions", "sgd", "fp16", max_grad_norm=0.5, has_schedule=True),
        GRAPHED | {"channels_last": True, "workers": 2},
    ),
    (
        Setup("gpt", "adamw", "fp16", max_grad_norm=0.5, has_schedule=True),
        GRAPHED | {"sdpa_backend": "flash", "activation_checkpointing": True, "in_memory": True},
    ),
    (
        Setup("gpt", "sgd", "tf32", accumulate=2, max_grad_norm=0.5, has_schedule=True),
        {"fused_optimizer": True, "sdpa_backend": "math", "activation_checkpointing": True, "workers": 1},
    ),
    (Setup("recommender", "adamw", "fp16"), GRAPHED | {"torchscript": "trace", "in_memory": True}),
    (Setup("recommender", "sgd", "bf16", max_grad_norm=0.5), GRAPHED | {"workers": 2}),
]


@pytest.mark.parametrize(("setup", "techniques"), IN_COMPANY, ids=[_name(techniques) for _, techniques in IN_COMPANY])
def test_together_with_other_techniques(setup: Setup, techniques: dict[str, Any]) -> None:
    check(setup, techniques)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("techniques", [{}, GRAPHED], ids=["torch", "graph"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_on_the_second_device(precision: str, techniques: dict[str, Any]) -> None:
    check(Setup("convolutions", "adamw", precision, max_grad_norm=0.5), techniques, device="cuda:1")
    assert torch.cuda.current_device() == 0

"""Operations of the device and calls of the runtime in one update, counted exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatout.amp import GradScaler, grad_norms
from flatout.optim import AdamW, update
from tests.emulated_cuda.record import needs_emulated_devices, recorded

pytestmark = needs_emulated_devices

Update = Callable[[AdamW], object]

QUERIES = frozenset(("cudaGetDevice", "cudaSetDevice", "cuDevicePrimaryCtxGetState"))
"""Calls that only read or set host state, such as the current device."""

OPERATIONS = ["kernel check_kernel", "kernel step_kernel"]
CAPTURING = "cudaStreamIsCapturing"
LAUNCH = [CAPTURING, "cudaLaunchKernel"]
CALLS = [CAPTURING, *LAUNCH, *LAUNCH]
WITH_MASTERS = [CAPTURING, *LAUNCH, CAPTURING, *LAUNCH]


def clipped(optimizer: AdamW) -> None:
    update(optimizer, max_grad_norm=1.0)


def averaged(optimizer: AdamW) -> None:
    update(optimizer, inv_scale=0.25, max_grad_norm=1.0)


def scaled() -> Update:
    scaler = GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))

    def run(optimizer: AdamW) -> None:
        scaler.step(optimizer, max_grad_norm=1.0)
        scaler.update()

    return run


FORMS: dict[str, tuple[Callable[[], Update], torch.dtype, dict[str, Any], list[str]]] = {
    "fp32": (lambda: clipped, torch.float32, {}, CALLS),
    "fp32, mean of 4 batches": (lambda: averaged, torch.float32, {}, CALLS),
    "fp16, scaler": (
        scaled,
        torch.float16,
        {"master_weights": "float32"},
        [CAPTURING, *WITH_MASTERS, CAPTURING],
    ),
    "bf16, masters": (lambda: clipped, torch.bfloat16, {"master_weights": "float32"}, WITH_MASTERS),
}
"""Update function, dtype of the parameters, options of the optimizer, and expected calls."""


@pytest.mark.parametrize("tensors", [1, 100, 2000])
@pytest.mark.parametrize("form", FORMS)
def test_one_lazy_update(form: str, tensors: int) -> None:
    make, dtype, options, calls = FORMS[form]
    params = [torch.nn.Parameter(torch.ones(3 + i % 5, dtype=dtype, device="cuda")) for i in range(tensors)]
    optimizer, run = AdamW(params, **options), make()
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):  # the first update creates states and tables
        run(optimizer)
    record = recorded(lambda: run(optimizer))
    assert record.operations == OPERATIONS
    assert [call for call in record.calls if call not in QUERIES] == calls


def test_groups_with_other_numbers_share_a_launch() -> None:
    groups = [{"params": torch.nn.Parameter(torch.ones(3, device="cuda")), "lr": 0.01 * i} for i in range(28)]
    groups[5]["lr"] = torch.tensor(0.1, device="cuda")
    optimizer = AdamW(groups)
    for group in groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    for _ in range(2):  # the first update creates states and tables
        clipped(optimizer)
    assert recorded(lambda: clipped(optimizer)).operations == OPERATIONS


@pytest.mark.parametrize("tensors", [1, 2000])
def test_norms_of_gradients_are_one_launch(tensors: int) -> None:
    params = [torch.nn.Parameter(torch.ones(5, device="cuda")) for _ in range(tensors)]
    for p in params:
        p.grad = torch.ones_like(p)
    assert recorded(lambda: grad_norms(params)).operations == ["kernel norms_kernel"]

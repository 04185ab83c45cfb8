"""Gradients after a plain step with a scaler: equal to those of the CPU, for every kind of kernel."""

from __future__ import annotations

import math

import pytest
import torch

import flatout.optim as fo
from flatout import native
from flatout.amp import GradScaler

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not native.BUILT_WITH_CUDA, reason="this build has no CUDA kernels"),
]
SIZES = [1, 3, 0, 35, 16383, 16384, 16385, 100_003, 0]
KINDS = [
    (torch.float32, {}),
    (torch.float32, {"maximize": True, "ema_decay": 0.5, "low_precision_copy": torch.bfloat16}),
    (torch.float32, {"moment_dtype": torch.uint8}),
    (torch.float64, {"amsgrad": True}),
    (torch.float16, {"master_weights": "float32"}),
    (torch.bfloat16, {"master_weights": "remainder"}),
    (torch.bfloat16, {"stochastic_rounding": True}),
    (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": torch.uint8}),
]


@pytest.mark.parametrize("bad", [None, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("dtype", "options"), KINDS, ids=str)
def test_plain_steps_leave_the_cpus_gradients(dtype, options, offset, bad):
    """An offset misaligns gradients: their vectors are loaded and stored lane by lane."""
    left = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        grads = [(torch.randn(n, generator=generator) * 100).to(dtype) for n in SIZES]
        if bad is not None:
            grads[-2][77] = bad
        params = [torch.nn.Parameter(torch.ones(n, dtype=dtype, device=device)) for n in SIZES]
        for p, g in zip(params, grads, strict=True):
            place = torch.empty(g.numel() + offset, dtype=dtype, device=device)[offset:]
            p.grad = place.copy_(g)
        scaler = GradScaler(device, init_scale=1536.0)
        scaler.scale(torch.ones((), device=device))
        scaler.step(fo.AdamW(params, lr=0.1, **options))
        assert scaler.last_step_skipped.item() == (bad is not None)
        assert (params[-2].detach() == 1).all().item() == (bad is not None)
        left.append([p.grad.cpu() for p in params])
    for cpu, cuda in zip(*left, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=0, atol=0, equal_nan=True)


def test_counts_in_float64_are_counted():
    p = torch.nn.Parameter(torch.ones(5, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = fo.AdamW([p])
    optimizer.state[p]["step"] = torch.tensor(2.0**24, dtype=torch.float64)
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][key] = torch.ones_like(p.detach())
    optimizer.step()
    assert optimizer.state[p]["step"].dtype == torch.float64
    assert optimizer.state[p]["step"].item() == 2.0**24 + 1

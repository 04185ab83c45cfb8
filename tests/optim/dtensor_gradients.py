"""Checks that :mod:`tests.optim.test_dtensor` runs on each of four ranks: gradients after a step with a scaler."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

import flatout.amp as fa
import flatout.optim as fo
from tests.optim.dtensor_checks import WORLD, assert_spread, mesh_of, set_grads, spread, twins
from tests.optim.harness import only_native


def scaler_of(cls=fa.GradScaler, scale=1536.0):
    scaler = cls("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    return scaler


def plain_steps_leave_unscaled_gradients(place):
    """Steps unscale in the native pass, also after a skipped step, with either scaler."""
    theirs, ours, plain, spread_out = twins("AdamW", place)
    for cls in (fa.GradScaler, torch.amp.GradScaler):
        for seed, bad in ((0, False), (1, True), (2, False)):
            set_grads(plain, spread_out, place, seed)
            if bad:
                plain[3].grad[50] = math.inf
                spread_out[3].grad = spread(plain[3].grad, place)
            versions = [d.grad._version for d in spread_out]
            with only_native():
                scaler_of(cls).step(ours)
                scaler_of(cls).step(theirs)
            for p, d, version in zip(plain, spread_out, versions, strict=True):
                assert_spread(d.grad, p.grad, place)
                assert_spread(d.detach(), p, place)
                assert d.grad._version > version


def partial_gradients_are_unscaled():
    """Partial gradients stay partial. Each part is unscaled."""
    line = mesh_of((WORLD,))
    p = torch.nn.Parameter(DTensor.from_local(torch.ones(3), line, [Replicate()], run_check=False))
    part = torch.arange(3.0) + dist.get_rank()
    p.grad = DTensor.from_local(part, line, [Partial()], run_check=False)
    whole = p.grad.full_tensor()
    scaler_of(scale=4.0).step(fo.SGD([p], lr=1.0))
    assert p.grad.placements == (Partial(),)
    assert torch.equal(p.grad.full_tensor(), whole / 4)
    assert torch.equal(p.detach().full_tensor(), 1 - whole / 4)

"""torch's own AMP recipe and examples: the user's autocast takes precedence, and gradients are scaled once."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import flatout
from tests.jobs import Net
from tests.own_loops.harness import BF16, EXACT, Loop, assert_alike, make, plain, sgd


def amp_recipe(model: nn.Module, loader: Any, use_amp: bool = True) -> list[float]:
    """Train by "All together" of docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html, on a CPU in bfloat16."""
    device, losses = "cpu", []
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_fn = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(device, enabled=use_amp)
    for _ in range(2):
        for input, target in loader:
            with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
                output = model(input)
                assert output.dtype is (torch.bfloat16 if use_amp else torch.float32)
                loss = loss_fn(output, target)
                assert loss.dtype is torch.float32
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            losses.append(loss.item())
    return losses


def amp_without(model: nn.Module, loader: Any) -> list[float]:
    return amp_recipe(model, loader, use_amp=False)


def amp_inspected(model: nn.Module, loader: Any) -> list[float]:
    """Train by the recipe's "Inspecting/modifying gradients": unscale_, then clip."""
    opt, scaler, losses = sgd(model), torch.amp.GradScaler("cpu"), []
    for input, target in loader:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = model(input)
            loss = functional.cross_entropy(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def amp_accumulated(model: nn.Module, loader: Any) -> list[float]:
    """Train by "Gradient accumulation" of docs.pytorch.org/docs/stable/notes/amp_examples.html."""
    optimizer, scaler, losses, iters_to_accumulate = sgd(model), torch.amp.GradScaler("cpu"), [], 3
    for i, (input, target) in enumerate(loader):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = model(input)
            loss = functional.cross_entropy(output, target)
            loss = loss / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def amp_penalised(model: nn.Module, loader: Any) -> list[float]:
    """Train by "Gradient penalty" of the same notes."""
    optimizer, scaler, losses = sgd(model), torch.amp.GradScaler("cpu"), []
    for input, target in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = model(input)
            loss = functional.cross_entropy(output, target)
        scaled_grad_params = torch.autograd.grad(
            outputs=scaler.scale(loss), inputs=list(model.parameters()), create_graph=True
        )
        inv_scale = 1.0 / scaler.get_scale()
        grad_params = [p * inv_scale for p in scaled_grad_params]
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            grad_norm = torch.zeros(())
            for grad in grad_params:
                grad_norm = grad_norm + grad.pow(2).sum()
            grad_norm = grad_norm.sqrt()
            loss = loss + grad_norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def amp_several_optimizers(model: nn.Module, loader: Any) -> list[float]:
    """Train by "Working with multiple models, losses, and optimizers" of the same notes."""
    optimizer0 = torch.optim.SGD(model.body[:2].parameters(), lr=0.05)
    optimizer1 = torch.optim.SGD(model.body[2:].parameters(), lr=0.05)
    scaler, losses = torch.amp.GradScaler("cpu"), []
    for input, target in loader:
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output0 = model(input)
            output1 = model(input)
            loss0 = functional.cross_entropy(2 * output0 + 3 * output1, target)
            loss1 = functional.cross_entropy(3 * output0 - 5 * output1, target)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.unscale_(optimizer0)
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        scaler.update()
        losses += [loss0.item(), loss1.item()]
    return losses


def cuda_amp(model: nn.Module, loader: Any) -> list[float]:
    """Train by the loop of older tutorials. Without a GPU both parts of it warn and do nothing."""
    opt, losses = sgd(model), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.cuda.amp.GradScaler()
        for input, target in loader:
            opt.zero_grad()
            with torch.cuda.amp.autocast():
                output = model(input)
                loss = functional.cross_entropy(output, target)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
    return losses


AMP_LOOPS: list[Loop] = [amp_recipe, amp_inspected, amp_accumulated, amp_penalised, amp_several_optimizers]


@pytest.mark.parametrize("loop", AMP_LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("techniques", [EXACT, BF16], ids=["fp32", "bf16"])
def test_an_amp_loop_is_autocast_once(loop: Loop, techniques: dict[str, Any]) -> None:
    """The user's autocast takes precedence over flatout's precision. The losses agree except for the last bits."""
    assert_alike(make, loop, techniques, rel=1e-4)


@pytest.mark.parametrize("loop", [amp_without, cuda_amp], ids=lambda loop: loop.__name__)
def test_an_amp_loop_whose_autocast_is_off_is_any_loop(loop: Loop) -> None:
    assert_alike(make, loop, EXACT, rel=1e-4)


def test_autocast_that_is_off_around_the_call_stays_off() -> None:
    """``autocast(enabled=False)`` inside an outer autocast requests float32."""
    model, loader = make()
    model, loader = flatout.optimize(model, loader, techniques=BF16, budget=0)
    seen: list[torch.dtype] = []
    model.body[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x, _ = next(iter(loader))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
    assert model(x).dtype is torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_a_forward_with_an_autocast_of_its_own() -> None:
    """DataParallel's documentation recommends this form."""

    class Own(Net):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    make_own = functools.partial(make, Own)
    assert_alike(make_own, plain, EXACT, rel=1e-4)
    with pytest.raises(ValueError, match="precision"):
        assert_alike(make_own, plain, BF16, rel=1e-4)

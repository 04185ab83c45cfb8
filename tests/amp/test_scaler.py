"""GradScaler equals torch's with both scalers and both optimizers, lazily and eagerly."""

from __future__ import annotations

import pickle

import pytest
import torch

import flatout.amp as fa
import flatout.optim as fo
from tests.optim.rules import RULES

BAD = (1, 2, 6)  # steps with an infinity in them


def train(scaler_class, optimizer_module, name, form, dtype=torch.float32):
    torch.manual_seed(0)
    p, q = (torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (33, 70_000))
    groups = [{"params": [p]}, {"params": [q], "lr": 1e-2}]
    optimizer = getattr(optimizer_module, name)(groups, lr=1e-3, **RULES[name].options)
    scaler = scaler_class("cpu", init_scale=512.0, growth_interval=3)
    scales = []
    for step in range(9):
        optimizer.zero_grad()
        weight = float("inf") if step in BAD else 1.0 + step
        loss = (p.sum() * weight + (q * q).sum() * 0.1).float()
        scaler.scale(loss).backward()
        if form == "eager":
            scaler.unscale_(optimizer)
            clip = torch.nn.utils.clip_grad_norm_ if optimizer_module is torch.optim else fa.clip_grad_norm_
            clip([p, q], 2.0)
            scaler.step(optimizer)
        elif form == "lazy":
            scaler.step(optimizer, max_grad_norm=2.0)
        else:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, p.detach(), q.detach(), optimizer, scaler


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fa.GradScaler], ids=["torch_scaler", "flatout_scaler"])
@pytest.mark.parametrize("module", [torch.optim, fo], ids=["torch_optim", "flatout_optim"])
@pytest.mark.parametrize("form", ["eager", "lazy", "plain"])
def test_any_pairing_equals_torch(form, module, scaler, name):
    if form == "lazy" and scaler is torch.amp.GradScaler:
        pytest.skip("torch's scaler has no max_grad_norm")
    expected = train(torch.amp.GradScaler, torch.optim, name, "eager" if form == "lazy" else form)
    result = train(scaler, module, name, form)
    assert result[0] == expected[0], "the scale has the same history"
    for ours, theirs in zip(result[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert result[4].state_dict() == expected[4].state_dict()


def test_a_step_asks_the_device_nothing(monkeypatch):
    """The test counts .item(), bool() and float() calls, which synchronize on a GPU."""
    p = torch.nn.Parameter(torch.ones(10))
    optimizer, scaler = fo.AdamW([p]), fa.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    for name in ("item", "__bool__", "__float__", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a: pytest.fail("the step waited for the device"))
    scaler.step(optimizer, max_grad_norm=1.0)
    scaler.update()


def test_unscaled_then_step_with_a_clip_inside():
    p, q = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer, reference = fo.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1)
    scaler = fa.GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.sum() * 3).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.full((5,), 3.0))
    scaler.step(optimizer, max_grad_norm=1.0)
    q.grad = torch.full((5,), 3.0)
    torch.nn.utils.clip_grad_norm_(q, 1.0)
    reference.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("unscale", [True, False])
def test_a_skipped_first_step_of_torchs_fused_sgd_leaves_no_trace(unscale):
    p, scaler = torch.nn.Parameter(torch.ones(8)), fa.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.5, fused=True)
    for grad in (float("inf"), 1.0, 1.0):
        p.grad = torch.full_like(scaler.scale(p.detach()), grad) * (scaler.get_scale() if grad == 1 else 1)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.last_step_skipped == (grad != 1)
        assert (optimizer.state[p].get("momentum_buffer") is None) == (grad != 1)
        scaler.update()
    assert torch.equal(p.detach(), torch.full((8,), 1 - 1 - 1.5))


def test_misuse_is_refused_as_in_torch():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer, scaler = fo.SGD([p], lr=0.1), fa.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    p.grad = None
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    half = torch.nn.Parameter(torch.ones(5, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(fo.SGD([half], lr=0.1))


def test_disabled_and_pickled():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = fo.SGD([p], lr=1.0), fa.GradScaler("cpu", enabled=False)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer, max_grad_norm=1.0)
    scaler.update()
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.5))
    enabled = fa.GradScaler("cpu", init_scale=4.0)
    assert pickle.loads(pickle.dumps(enabled)).state_dict() == enabled.state_dict()

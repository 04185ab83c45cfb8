"""What other fused optimizers get wrong, each defect as a test (sources in each docstring)."""

from __future__ import annotations

import copy

import pytest
import torch

import flatout.optim as fo
from flatout.amp import GradScaler, clip_grad_norm_, unscale_and_check_
from flatout.measure.state import State
from flatout.optim import update


@pytest.mark.parametrize("dampening", [0.0, 0.4])
def test_a_skipped_first_sgd_step_leaves_no_trace(dampening):
    """torch's fused SGD keeps an uninitialised momentum buffer, used by the next step."""
    p, q = (torch.nn.Parameter(torch.ones(1000)) for _ in range(2))
    optimizer = fo.SGD([p], lr=0.1, momentum=0.9, dampening=dampening)
    reference = torch.optim.SGD([q], lr=0.1, momentum=0.9, dampening=dampening)
    for _ in range(2):
        p.grad = torch.full_like(p, float("inf"))
        update(optimizer, inv_scale=torch.tensor(1.0))
    saved = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert saved is None or not saved.any()
    for step in range(3):
        p.grad, q.grad = (torch.full((1000,), 1.0 + step) for _ in range(2))
        update(optimizer, inv_scale=torch.tensor(1.0))
        reference.step()
    torch.testing.assert_close(p, q)
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"])


def test_a_buffer_that_waits_for_its_first_step_travels_as_none():
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = fo.SGD([p], lr=0.1, momentum=0.9, dampening=0.4)
    p.grad = torch.full_like(p, float("nan"))
    update(optimizer, inv_scale=torch.tensor(1.0))
    other = torch.optim.SGD([q], lr=0.1, momentum=0.9, dampening=0.4)
    other.load_state_dict(optimizer.state_dict())
    p.grad, q.grad = torch.ones(4), torch.ones(4)
    optimizer.step(), other.step()
    torch.testing.assert_close(p, q)


def test_saving_changes_nothing():
    """A checkpoint between a skipped first step and the next one must not be seen by training."""
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizers = [fo.SGD([x], lr=0.1, momentum=0.9, dampening=0.4) for x in (p, q)]
    for value in (float("inf"), 1.0, 2.0):
        p.grad, q.grad = (torch.full((4,), value) for _ in range(2))
        for optimizer in optimizers:
            update(optimizer, inv_scale=torch.tensor(1.0))
        before = {key: id(value) for key, value in optimizers[0].state[p].items()}
        saved, copied = optimizers[0].state_dict()["state"][0], copy.deepcopy(optimizers[0])
        assert saved.keys() == {"momentum_buffer"}
        assert (saved["momentum_buffer"] is None) == (value == float("inf"))
        assert [state.keys() for state in copied.state.values()] == [saved.keys()]
        assert {key: id(value) for key, value in optimizers[0].state[p].items()} == before
    torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_a_snapshot_of_the_state_holds_the_first_step():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fo.SGD([p], lr=0.1, momentum=0.9, dampening=0.4)
    p.grad = torch.full_like(p, float("inf"))
    update(optimizer, inv_scale=torch.tensor(1.0))
    snapshot = State.capture([], optimizer)
    results = []
    for _ in range(2):
        for value in (1.0, 2.0):
            p.grad = torch.full_like(p, value)
            optimizer.step()
        results.append(p.detach().clone())
        snapshot.restore()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_half_precision_norm_does_not_overflow():
    """torch takes the norm in the gradients' dtype: 3,000 x 1,000 in float16 gives inf."""
    p = torch.nn.Parameter(torch.zeros(3000, dtype=torch.float16))
    p.grad = torch.full_like(p, 1000.0)
    norm = clip_grad_norm_([p], 1e9)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(1000 * 3000**0.5, rel=1e-6)
    for order in (1.0, float("inf")):
        assert clip_grad_norm_([p], 1e9, order).item() == pytest.approx({1.0: 3e6}.get(order, 1000.0))


def test_bfloat16_norm_keeps_its_digits():
    """torch rounds it to bfloat16: 83.5 for 83.67."""
    p = torch.nn.Parameter(torch.zeros(7000, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    assert clip_grad_norm_(p, 1e9).item() == pytest.approx(7000**0.5, rel=1e-6)


@pytest.mark.parametrize("sizes", [(7, 0), (0, 7), (0, 7, 0, 0), (0,)])
def test_empty_tensors_drop_no_updates(sizes):
    """apex and DeepSpeed launch inside the chunk loop: a trailing empty tensor drops what is pending."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in sizes]
    for p in params:
        p.grad = torch.ones_like(p)
    result = update(fo.SGD(params, lr=1.0), max_grad_norm=1e9)
    assert all(not p.any() for p in params)
    assert result.grad_norm.item() == pytest.approx(sum(sizes) ** 0.5)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_unscale_then_clip_then_step_unscales_once(name):
    """apex and TransformerEngine unscale twice."""
    p, q = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer, reference = getattr(fo, name)([p], lr=0.1), getattr(torch.optim, name)([q], lr=0.1)
    scaler = GradScaler("cpu", init_scale=16.0)
    (scaler.scale((p * torch.arange(5.0)).sum())).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_([p], 1.0)
    scaler.step(optimizer)
    q.grad = torch.arange(5.0)
    torch.nn.utils.clip_grad_norm_([q], 1.0)
    reference.step()
    torch.testing.assert_close(p, q)


def test_bfloat16_gradients_can_be_unscaled():
    """torch's CUDA kernel refuses them."""
    g = torch.full((9,), 8.0, dtype=torch.bfloat16)
    found_inf, norm = unscale_and_check_(g, 0.25)
    assert (found_inf.item(), norm.item()) == (0, 6)
    assert (g == 2).all()


def test_the_norm_does_not_depend_on_threads():
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator) for n in (100_001, 3, 700_000, 16_384)]
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(torch.ops.flatout.unscale_and_check(grads, None, 1.0)[1].item())
    finally:
        torch.set_num_threads(threads)
    assert len(set(results)) == 1
    exact = sum(g.double().square().sum() for g in grads).sqrt().item()
    assert results[0] == pytest.approx(exact, rel=1e-6)

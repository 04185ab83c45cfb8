"""Defects of other optimizers and scalers. Each test names its source in the docstring.

Issue numbers without a repository are pytorch/pytorch's.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

import flatout.optim as fo
from flatout.amp import GradScaler, clip_grad_norm_, unscale_and_check_
from flatout.core.snapshot import Snapshot
from flatout.optim import update


@pytest.mark.parametrize("dampening", [0.0, 0.4])
def test_a_skipped_first_sgd_step_leaves_no_trace(dampening):
    """torch's fused SGD leaves an uninitialized buffer after a skipped first step.

    ``_fused_sgd`` (``torch/optim/sgd.py``) makes the buffer with ``empty_like`` and keeps it. The next step multiplies
    this memory, and a parameter became 3.6e20 (torch 2.13, CPU).
    """
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
    """Training must not depend on a checkpoint between a skipped first step and the next step."""
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizers = [fo.SGD([x], lr=0.1, momentum=0.9, dampening=0.4) for x in (p, q)]
    for value in (float("inf"), 1.0, 2.0):
        p.grad, q.grad = (torch.full((4,), value) for _ in range(2))
        for optimizer in optimizers:
            update(optimizer, inv_scale=torch.tensor(1.0))
        before = {key: id(value) for key, value in optimizers[0].state[p].items()}
        saved = optimizers[0].state_dict()["state"][0]
        assert saved.keys() == {"momentum_buffer"}
        assert (saved["momentum_buffer"] is None) == (value == float("inf"))
        assert {key: id(value) for key, value in optimizers[0].state[p].items()} == before
    torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_a_snapshot_of_the_state_holds_the_first_step():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fo.SGD([p], lr=0.1, momentum=0.9, dampening=0.4)
    p.grad = torch.full_like(p, float("inf"))
    update(optimizer, inv_scale=torch.tensor(1.0))
    snapshot = Snapshot.capture([], optimizer)
    results = []
    for _ in range(2):
        for value in (1.0, 2.0):
            p.grad = torch.full_like(p, value)
            optimizer.step()
        results.append(p.detach().clone())
        snapshot.restore()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_half_precision_norm_does_not_overflow():
    """``torch.nn.utils.get_total_norm`` computes the norm in the gradients' dtype (pull request 194033).

    3,000 gradients of 1,000 in float16 give inf.
    """
    p = torch.nn.Parameter(torch.zeros(3000, dtype=torch.float16))
    p.grad = torch.full_like(p, 1000.0)
    norm = clip_grad_norm_([p], 1e9)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(1000 * 3000**0.5, rel=1e-6)
    for order in (1.0, float("inf")):
        assert clip_grad_norm_([p], 1e9, order).item() == pytest.approx({1.0: 3e6}.get(order, 1000.0))


def test_bfloat16_norm_keeps_its_digits():
    """``torch.nn.utils.get_total_norm`` rounds the norm to bfloat16 (pull request 194033): 83.5 instead of 83.67."""
    p = torch.nn.Parameter(torch.zeros(7000, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    assert clip_grad_norm_(p, 1e9).item() == pytest.approx(7000**0.5, rel=1e-6)


@pytest.mark.parametrize("sizes", [(7, 0), (0, 7), (0, 7, 0, 0), (0,)])
def test_empty_tensors_drop_no_updates(sizes):
    """apex and DeepSpeed drop pending work after a trailing empty tensor.

    They launch inside the chunk loop (``csrc/multi_tensor_apply.cuh``).
    """
    params = [torch.nn.Parameter(torch.ones(n)) for n in sizes]
    for p in params:
        p.grad = torch.ones_like(p)
    result = update(fo.SGD(params, lr=1.0), max_grad_norm=1e9)
    assert all(not p.any() for p in params)
    assert result.grad_norm.item() == pytest.approx(sum(sizes) ** 0.5)


@pytest.mark.parametrize("flags", [{}, {"capturable": True}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler], ids=["ours", "torchs"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_unscale_then_clip_then_step_unscales_once(name, scaler_class, flags):
    """apex and TransformerEngine unscale a second time after ``unscale_``.

    They read the scaler's scale, but not its stage (``optimizers/fused_adam.py``, capturable). Lightning refuses the
    combination of fused, fp16 and clipping for a similar reason (Lightning-AI/pytorch-lightning#15555).
    """
    if name == "SGD" and "capturable" in flags:
        flags = {}
    p, q = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    # With this eps, AdamW's first step depends on the size of the gradient.
    options = {"lr": 0.1, **({"eps": 1.0} if name == "AdamW" else {})}
    optimizer = getattr(fo, name)([p], **options, **flags)
    reference = getattr(torch.optim, name)([q], **options)
    scaler = scaler_class("cpu", init_scale=16.0)
    for _ in range(2):
        p.grad = None
        scaler.scale((p * torch.arange(5.0)).sum()).backward()
        scaler.unscale_(optimizer)
        assert torch.equal(p.grad, torch.arange(5.0))
        clip_grad_norm_([p], 1.0)
        scaler.step(optimizer)
        scaler.update()
        q.grad = torch.arange(5.0)
        torch.nn.utils.clip_grad_norm_([q], 1.0)
        reference.step()
    torch.testing.assert_close(p, q)


def test_clip_in_the_step_is_clip():
    """bitsandbytes' kernels have a ``gnorm_scale``, but its Python code always passes 1.0 (``optim/optimizer.py``)."""
    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.full_like(p, 8.0)
    update(fo.SGD([p], lr=1.0), max_grad_norm=4.0)
    torch.testing.assert_close(p.detach(), torch.full((4,), -2.0))


def test_bfloat16_gradients_can_be_unscaled():
    """torch's CUDA kernel refuses bfloat16 gradients (#127176, pull request 194947)."""
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


def test_bfloat16_gradients_go_through_the_scaler():
    """The test covers ``unscale_``, and the step that unscales in registers (#127176)."""
    for eager in (True, False):
        p = torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
        optimizer, scaler = fo.SGD([p], lr=0.5), GradScaler("cpu", init_scale=4.0)
        scaler.scale(p.sum()).backward()
        assert p.grad.dtype == torch.bfloat16
        if eager:
            scaler.unscale_(optimizer)
            assert (p.grad == 1).all()
        scaler.step(optimizer)
        assert (p == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masters", [None, "float32"])
def test_float32_moments_stay_float32(masters, dtype):
    """apex's capturable Adam rounds float32 moments to the parameter's dtype (``csrc/multi_tensor_adam.cu``).

    torch's ``load_state_dict`` does the same. 16 bits cannot represent 0.5 + 2**-13.
    """
    p = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    make = lambda: fo.AdamW([p], betas=(0.5, 0.5), moment_dtype=torch.float32, master_weights=masters)  # noqa: E731
    optimizer = make()
    for value in (2.0, 2.0**-12):
        p.grad = torch.full_like(p, value)
        optimizer.step()
    expected = {"exp_avg": 0.5 + 2.0**-13, "exp_avg_sq": 1.0 + 2.0**-25}
    for _ in range(2):
        for key, value in expected.items():
            moment = optimizer.state[p][key]
            assert moment.dtype == torch.float32
            torch.testing.assert_close(moment, torch.full((4,), value), rtol=0, atol=0)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = make()
        optimizer.load_state_dict(saved)


def test_masters_are_saved():
    """apex keeps its masters outside ``state_dict`` (``optimizers/fused_adam.py``).

    After loading, apex makes new masters from the rounded parameters.
    """
    for masters in ("float32", "remainder"):
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = fo.SGD([p], lr=2.0**-12, master_weights=masters)
        p.grad = torch.ones_like(p)
        for _ in range(3):  # 3 x 2**-12 below 1 is still 1 in bfloat16
            optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = fo.SGD([p], lr=2.0**-12, master_weights=masters)
            optimizer.load_state_dict(saved)
        assert (p == 1).all()
        for _ in range(6):  # 9 of 16 x 2**-12 round to a unit below 1, while 6 would round to 1
            optimizer.step()
        assert (p == 1 - 2.0**-8).all()


def test_bfloat16_parameters_have_masters_too():
    """apex takes ``master_weights`` for float16 only, and ignores it for bfloat16 (``optimizers/fused_adam.py``)."""
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = fo.AdamW([p], lr=1e-4, master_weights="float32")
    p.grad = torch.ones_like(p)
    optimizer.step()
    master = optimizer.state[p]["master"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((4,), 1 - 1e-4 - 1e-6), rtol=1e-6, atol=0)
    assert (p == 1).all(), "the update is less than half a unit of bfloat16"


@pytest.mark.parametrize("moment_dtype", [None, torch.bfloat16], ids=str)
def test_a_nan_does_not_empty_the_moments(moment_dtype):
    """bitsandbytes' 8-bit kernels set moments to zero if the gradient is NaN or infinite (``csrc/kernels.cu``)."""
    p = torch.nn.Parameter(torch.ones(300))
    additions = {} if moment_dtype is None else {"moment_dtype": moment_dtype}
    optimizer = fo.AdamW([p], lr=0.1, **additions)
    p.grad = torch.full_like(p, 2.0)
    update(optimizer, inv_scale=torch.tensor(1.0))
    before = {key: value.clone() for key, value in optimizer.state[p].items()}
    for bad in (math.nan, math.inf, -math.inf):
        p.grad = torch.full_like(p, 2.0)
        p.grad[7] = bad
        assert update(optimizer, inv_scale=torch.tensor(1.0)).found_inf == 1
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in before.items())
    assert before["exp_avg"].any()


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_count_is_loaded_as_one(dtype, flags):
    """torch casts fused step counts to the parameter's dtype, and leaves them on the saved device (#103256, #124133).

    Old checkpoints hold Python numbers. bfloat16 cannot represent 257.
    """
    p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    p.grad = torch.ones_like(p)
    source = torch.optim.AdamW([p])
    source.step()
    for step in (257, 257.0, torch.tensor(257.0), torch.tensor(257.0, dtype=torch.float64)):
        saved = copy.deepcopy(source.state_dict())
        saved["state"][0]["step"] = step
        saved["param_groups"][0].update(flags)
        optimizer = fo.AdamW([p], **flags)
        optimizer.load_state_dict(saved)
        optimizer.step()
        count = optimizer.state_dict()["state"][0]["step"]
        assert count == 258
        kept = isinstance(step, torch.Tensor) and not flags  # as in torch's load
        assert (count.dtype, count.device) == (step.dtype if kept else torch.float32, p.device)
        other = torch.optim.AdamW([p])
        saved = optimizer.state_dict()
        saved["param_groups"][0].update({flag: None for flag in flags})
        other.load_state_dict(saved)
        other.step()
        assert other.state[p]["step"] == 259


def test_clipping_says_that_the_norm_is_not_finite():
    """torch's ``clip_grad_norm_`` silently turns all gradients into NaN by default (#46849).

    flatout's update reports the norm by default, without synchronization.
    """
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = fo.SGD([p], lr=1.0)
    for bad, expected in ((math.inf, math.inf), (math.nan, math.nan), (1e15, 2e15)):
        p.grad = torch.full_like(p, 1e15)
        p.grad[2] = bad
        result = update(optimizer, max_grad_norm=1.0, skip_nonfinite=True)
        assert result.found_inf.item() == (0 if bad == 1e15 else 1)
        assert result.grad_norm.item() == pytest.approx(expected, nan_ok=True)
    torch.testing.assert_close(p.detach(), torch.full((4,), -0.5))
    p.grad = torch.tensor([math.inf, 1.0, 1.0, 1.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert torch.equal(p.grad, torch.tensor([math.inf, 1.0, 1.0, 1.0])), "refused before anything is changed"


def test_norms_of_many_tensors_are_each_ones_own():
    """``torch._foreach_norm`` returned norms of other tensors for lists of many large tensors (#140066)."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (70_000, 1, 0, 16_385, 5) * 25]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    for order in (1.0, 2.0, math.inf):
        exact = torch.linalg.vector_norm(torch.cat([p.grad.double() for p in params]), order).item()
        assert clip_grad_norm_(params, 1e9, order).item() == pytest.approx(exact, rel=1e-6)


def test_a_skipped_step_is_reported_without_reading_the_scale():
    """Users of torch compare ``get_scale()`` before and after a step to detect a skipped step, which syncs twice.

    See #67590, #152279 and huggingface/accelerate#1714.
    """
    p = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = fo.SGD([p], lr=1.0), GradScaler("cpu", init_scale=2.0)
    assert scaler.last_step_skipped is None
    for weight, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
        p.grad = None
        scaler.scale(p.sum() * weight).backward()
        scaler.step(optimizer)
        skipped_tensor = scaler.last_step_skipped
        assert isinstance(skipped_tensor, torch.Tensor)
        assert (skipped_tensor.dtype, skipped_tensor.dim()) == (torch.bool, 0)
        scaler.update()
        assert bool(skipped_tensor) == bool(scaler.last_step_skipped) == skipped

"""Gradients after a step with a scaler: unscaled as in torch, or unchanged in the lazy form."""

from __future__ import annotations

import math

import pytest
import torch

import flatout.amp as fa
import flatout.optim as fo
from flatout.optim.update import update
from tests.optim.rules import IN_TORCH, NAMES, RULES
from tests.training.recovery import harness

SIZES = [(1,), (3,), (0,), (5, 7), (129, 33), (16384,), (16385,)]
SCALE = 1536.0  # no power of 2: products are rounded
REAL = [torch.float32, torch.float64, torch.bfloat16]


def scaled(dtype, seed=0, sizes=SIZES):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=generator) * 1000).to(dtype) for size in sizes]


def parameters(grads, dtype=None):
    params = [torch.nn.Parameter(torch.ones_like(g, dtype=dtype, requires_grad=False)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.detach()
    return params


def scaler_of(cls=fa.GradScaler):
    scaler = cls("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    return scaler


def torchs(grads):
    """Return the gradients that torch's scaler leaves. On a CPU torch's scaler takes no complex gradients."""
    params = parameters([torch.view_as_real(g.clone()) if g.is_complex() else g.clone() for g in grads])
    scaler_of(torch.amp.GradScaler).step(torch.optim.SGD(params, lr=0.0))
    return [torch.view_as_complex(p.grad) if g.is_complex() else p.grad for p, g in zip(params, grads, strict=True)]


def assert_equal(ours, theirs):
    for g, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(g, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_step_leaves_torchs_gradients(name, dtype, bad):
    grads = scaled(dtype)
    if bad is not None:
        grads[-1][-1] = bad
    params = parameters([g.clone() for g in grads])
    versions = [p.grad._version for p in params]
    optimizer = getattr(fo, name)(params, lr=0.1, **RULES[name].options)
    scaler = scaler_of()
    scaler.step(optimizer)
    assert bool(scaler.last_step_skipped) == (bad is not None)
    assert all((p.detach() == 1).all() for p in params) == (bad is not None)
    assert_equal([p.grad for p in params], torchs(grads))
    assert all(p.grad._version > version for p, version in zip(params, versions, strict=True))


@pytest.mark.parametrize("options", [
    {"master_weights": "float32"}, {"master_weights": "remainder"}, {"moment_dtype": torch.uint8},
    {"stochastic_rounding": True}, {"moment_dtype": torch.uint8, "stochastic_rounding": True}, {"ema_decay": 0.5},
    {"maximize": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("bad", [False, True])
def test_the_same_under_all_additional_options(options, bad):
    grads = scaled(torch.bfloat16)
    if bad:
        grads[3][0, 0] = math.inf
    params = parameters([g.clone() for g in grads])
    scaler_of().step(fo.AdamW(params, **options))
    assert_equal([p.grad for p in params], torchs(grads))


@pytest.mark.parametrize("clip", [1.0, math.inf])
@pytest.mark.parametrize("dtype", [*REAL, torch.float16], ids=str)
def test_the_lazy_form_leaves_gradients_as_they_are(dtype, clip):
    grads = scaled(dtype)
    params = parameters([g.clone() for g in grads])
    versions = [p.grad._version for p in params]
    scaler_of().step(fo.AdamW(params, lr=0.1), max_grad_norm=clip)
    assert_equal([p.grad for p in params], grads)
    assert [p.grad._version for p in params] == versions
    assert not (params[-1] == 1).all()


@pytest.mark.parametrize("dtype", [*REAL, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_max_grad_norm_is_the_plain_step_without_writing(name, dtype):
    plain, lazy = (parameters(scaled(dtype)) for _ in range(2))
    optimizers = [getattr(fo, name)(ps, **RULES[name].options) for ps in (plain, lazy)]
    scaler = scaler_of()
    scaler.step(optimizers[0]), scaler.step(optimizers[1], max_grad_norm=math.inf)
    assert_equal(plain, lazy)


def test_an_infinite_max_grad_norm_clips_nothing_where_the_norm_overflows():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.full((3,), 2e19)  # its square is infinite in float32
    for scaler in (scaler_of(), fa.GradScaler("cpu", enabled=False)):
        scaler.step(fo.SGD([p], lr=1.0), max_grad_norm=math.inf)
        assert p.isfinite().all()
        assert (p < 0).all()


def test_float16_gradients_are_unscaled_in_float32_and_written_back_after_their_use():
    small = 1.25 * 2.0**-24  # 2**-24 in float16
    p = torch.nn.Parameter(torch.zeros(33, dtype=torch.float16))
    p.grad = torch.full((33,), small * 2**16, dtype=torch.float16)
    scaler = fa.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    scaler.step(fo.SGD([p], lr=1024.0))
    assert (p == -small * 1024).all()
    assert (p.grad == 2.0**-24).all()


# ---- gradients that a step cannot write in its pass --------------------------------------------------------


def shared(n=2):
    g = torch.linspace(-9, 9, 20)
    return [g] * n


def overlapping():
    g = torch.linspace(-9, 9, 30)
    return [g[:20], g[10:]]


def transposed():
    return [torch.linspace(-9, 9, 35).view(5, 7).t()]


def strided():
    return [torch.linspace(-9, 9, 40).view(5, 8)[:, ::2]]


def negative():
    return [torch.complex(torch.ones(5), torch.linspace(-9, 9, 5)).conj().imag]


def conjugate():
    return [torch.complex(torch.ones(5), torch.linspace(-9, 9, 5)).conj()]


def sparse():
    return [torch.sparse_coo_tensor([[0, 2, 0]], torch.tensor([4.0, 8.0, 1.0]), (5,), check_invariants=True)]


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("groups", [False, True], ids=["one_group", "groups"])
@pytest.mark.parametrize("make", [shared, overlapping, transposed, strided, negative, conjugate, sparse])
def test_gradients_of_all_sorts(make, groups, bad):
    """A gradient that is listed twice is unscaled twice, as in torch."""
    results = []
    for module in (torch.optim, fo):
        grads = make()
        if bad:
            grads[-1] = grads[-1] * math.inf
        params = [torch.nn.Parameter(torch.ones(g.shape, dtype=g.dtype)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        # Without momentum, dampening has no effect. Groups that differ in it have separate buckets.
        apart = [{"params": [p], "dampening": i} for i, p in enumerate(params)]
        optimizer = module.SGD(apart if groups else params, lr=0.5)
        if module is fo:
            scaler_of().step(optimizer)
        else:  # torch's formula, because torch's CPU scaler takes no complex and no negated gradients
            for g in grads:
                g.mul_(torch.tensor(SCALE).double().reciprocal().float())
            if not bad:
                optimizer.step()
        # An infinity times a number is a NaN where both are complex.
        left = [torch.nan_to_num(p.grad.to_dense().detach(), nan=7, posinf=7, neginf=7) for p in params]
        results.append((left, params))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.usefixtures("without_kernels")
def test_gradients_of_several_dtypes_and_devices_without_kernels():
    grads = [g for dtype in REAL for g in scaled(dtype)]
    for bad in (False, True):
        if bad:
            grads[0][0] = math.inf
        params = parameters([g.clone() for g in grads])
        scaler_of().step(fo.SGD(params))
        assert_equal([p.grad for p in params], torchs(grads))


def test_an_expanded_gradient_is_refused_before_anything_is_changed():
    p, q = (torch.nn.Parameter(torch.ones(n)) for n in (5, 4))
    p.grad, q.grad = torch.ones(5), torch.ones(1).expand(4)
    with pytest.raises(RuntimeError, match="expanded"):
        scaler_of().step(fo.SGD([p, q]))
    assert all((x == 1).all() for x in (p, q, p.grad, q.grad))
    scaler_of().step(fo.SGD([p, q]), max_grad_norm=math.inf)
    assert (q < 1).all()


# ---- code between the calls, and other callers -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_step_pre_hooks_see_unscaled_gradients(dtype):
    """Without unscaling, a hook would clip scaled gradients. The clip would then zero small float16 gradients."""
    p = torch.nn.Parameter(torch.zeros(33, dtype=dtype))
    optimizer = fo.SGD([p], lr=1.0)
    p.grad = torch.full((33,), SCALE, dtype=dtype)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(p.grad[0].item()))
    if dtype == torch.float32:
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_([p], 0.5) and None)
    scaler_of().step(optimizer)
    assert seen == [1.0 if dtype == torch.float32 else SCALE]
    expected = torch.full((33,), 0.5 / math.sqrt(33) if dtype == torch.float32 else 1.0, dtype=dtype)
    torch.testing.assert_close(p.grad, expected)
    torch.testing.assert_close(p.detach(), -expected)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fa.GradScaler], ids=["torch_scaler", "flatout_scaler"])
def test_torchs_fused_optimizers_leave_the_same(scaler, name, unscale):
    """The gradients are also divided by the user's own scale, which multiplies the scaler's."""
    grads = scaled(torch.float32)
    results = []
    for cls, module, options in ((torch.amp.GradScaler, torch.optim, {"fused": True}), (scaler, fo, {})):
        params = parameters([g.clone() for g in grads])
        optimizer = getattr(module, name)(params, lr=0.1, **options)
        scaler_ = scaler_of(cls)
        for own in (None, 4.0):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            if own is not None:
                optimizer.grad_scale = torch.tensor(own)
            if unscale:
                scaler_.unscale_(optimizer)
            scaler_.step(optimizer)
            scaler_.update()
            results.append([p.grad for p in params])
    for ours, theirs in zip(results[2:], results[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [False, True])
def test_an_update_leaves_gradients_scaled_unless_requested(bad):
    grads = scaled(torch.float32)
    if bad:
        grads[0][0] = math.nan
    for unscale_grads in (False, True):
        params = parameters([g.clone() for g in grads])
        result = update(fo.AdamW(params), inv_scale=torch.tensor(1 / 3), max_grad_norm=0.5, unscale_grads=unscale_grads)
        factor = torch.clamp(0.5 / (result.grad_norm + 1e-6), max=1.0) / 3 if unscale_grads else torch.ones(())
        for p, g in zip(params, grads, strict=True):
            torch.testing.assert_close(p.grad, g * factor, equal_nan=True)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fa.GradScaler], ids=["torch_scaler", "flatout_scaler"])
def test_a_step_without_gradients_is_taken_as_by_torchs_fused_optimizers(scaler, unscale):
    for cls, make in ((torch.amp.GradScaler, torch.optim.AdamW), (scaler, fo.AdamW)):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = make([p], fused=True)
        scaler_ = scaler_of(cls)
        if unscale:
            scaler_.unscale_(optimizer)
        scaler_.step(optimizer)
        assert not optimizer.state.get(p)
        if isinstance(scaler_, fa.GradScaler):
            assert scaler_.last_step_skipped is None
        with pytest.raises(RuntimeError, match="already been called"):
            scaler_.step(optimizer)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler_.update()


# ---- steps of a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.05}, {"accumulate": 2, "max_grad_norm": 0.05}], ids=str)
@pytest.mark.parametrize("name", ["fused adamw", "fused sgd", "adamw", "sgd"])
def test_a_run_leaves_gradients_scaled_only_for_flatouts_optimizers(name, settings):
    """The scale is a power of 2, so multiplying by the scale is exact."""
    accumulate = settings.get("accumulate", 1)
    scaled_run, plain_run = (
        harness.make(optimizer=name, is_scaled=is_scaled, **settings) for is_scaled in (True, False)
    )
    scale = scaled_run.scaler.get_scale()
    for batch in harness.batches_of(*[16] * accumulate):
        scaled_run.step(batch), plain_run.step(batch)
    assert not scaled_run.scaler.last_step_skipped
    assert_equal(scaled_run.model.parameters(), plain_run.model.parameters())
    ours, plain = ([p.grad for p in run.model.parameters()] for run in (scaled_run, plain_run))
    if "fused" in name:  # the plain run's gradients are the sum over batches
        assert scale > 1
        assert_equal(ours, [g * (scale / accumulate) for g in plain])
    else:
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-9)

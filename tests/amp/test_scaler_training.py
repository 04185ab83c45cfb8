"""Training loops with a scaler, from torch's own tests: the results with torch's and flatout's classes are equal."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.amp as fa
import flatout.optim as fo
from tests.optim.rules import IN_TORCH, RULES

INF, NAN = math.inf, math.nan
REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


# ---- unscaling -------------------------------------------------------------------------------------------------------


def optimizer_with(grads, module=torch.optim):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return module.SGD(params, lr=1.0)


def unscale(optimizer, inv_scale, allow_fp16=True):
    """Call torch's hook for ``unscale_``, and return the number of devices with a non-finite gradient."""
    scaler = fa.GradScaler("cpu")
    found = scaler._unscale_grads_(optimizer, torch.tensor(inv_scale), torch.tensor(0.0), allow_fp16)
    assert all(f.dtype == torch.float32 and f.device == device for device, f in found.items())
    return sum(f.item() for f in found.values())


def whole(value=4.0):
    return torch.full((20, 20), value)


def narrow(value=4.0):
    return whole(value)[:, :5]


def skewed(value=4.0):
    return torch.full((20, 10), value).t()


@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
@pytest.mark.parametrize("second", [whole, narrow, skewed])
@pytest.mark.parametrize("first", [whole, narrow, skewed])
def test_unscaling_whatever_the_layouts(first, second, bad):
    for where in range(2):
        grads = [first(), second()]
        if bad is not None:
            grads[where][2, 2] = bad
        assert unscale(optimizer_with(grads), 0.25) == (bad is not None)
        for i, g in enumerate(grads):
            expected = torch.ones_like(g)
            if bad is not None and i == where:
                expected[2, 2] = bad
            torch.testing.assert_close(g, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", range(-1, 9))
def test_unscaling_all_layouts_and_dtypes_at_once(where):
    grads = [shape().to(dtype) for dtype in REAL for shape in (whole, narrow)]
    grads.append(torch.full((3, 3), 4.0, dtype=torch.complex64))
    if where >= 0:
        grads[where][2, 2] = INF
    assert unscale(optimizer_with(grads), 0.25) == (where >= 0)
    for i, g in enumerate(grads):
        assert i == where or (g == 1).all()


@pytest.mark.parametrize("bad", [INF, NAN])
def test_unscaling_sparse_gradients(bad):
    def sparse(values, dtype=torch.float32):
        where = [[0, 1, 1], [2, 0, 2]]
        return torch.sparse_coo_tensor(where, torch.tensor(values, dtype=dtype), (2, 3), check_invariants=True)

    for dtype in (torch.float32, torch.float16):
        optimizer = optimizer_with([sparse([16.0, 32.0, 64.0], dtype)])
        assert unscale(optimizer, 0.25) == 0
        p = optimizer.param_groups[0]["params"][0]
        torch.testing.assert_close(p.grad.to_dense(), sparse([4.0, 8.0, 16.0], dtype).to_dense())
        p.grad = sparse([16.0, 32.0, bad], dtype)
        assert unscale(optimizer, 0.25) == 1
        # Each value is finite in float16. Two of them belong to one element, and their sum is infinite.
        p.grad = torch.sparse_coo_tensor(
            [[0, 1, 0], [2, 0, 2]], torch.tensor([64000.0, 32.0, 64000.0], dtype=dtype), (2, 3), check_invariants=True
        )
        assert unscale(optimizer, 0.25) == (dtype == torch.float16)


# ---- whole loops -----------------------------------------------------------------------------------------------------


def model_and_batches(dtype=torch.float32, batches=8):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 8)).to(dtype)
    pairs = [tuple(torch.randn(2, 5, 8, generator=generator).to(dtype)) for _ in range(batches)]
    return model, pairs


def loss_of(output, target):
    return (output - target).float().square().mean()


def plain(scaler, optimizer, model, x, y, clip):
    scaler.scale(loss_of(model(x), y)).backward()
    scaler.step(optimizer)


def clip_while_scaled(scaler, optimizer, model, x, y, clip):
    scaler.scale(loss_of(model(x), y)).backward()
    clip(model.parameters(), 0.2 * scaler.get_scale())
    scaler.step(optimizer)


def clip_unscaled(scaler, optimizer, model, x, y, clip):
    scaler.scale(loss_of(model(x), y)).backward()
    scaler.unscale_(optimizer)
    norm = clip(model.parameters(), 0.2, error_if_nonfinite=False)
    scaler.step(optimizer)
    return norm


def penalise(scaler, optimizer, model, x, y, clip):
    loss = loss_of(model(x), y)
    grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    grads = [g * (1.0 / scaler.get_scale()) for g in grads]
    loss = loss + sum(g.square().sum() for g in grads).sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)


def accumulate(scaler, optimizer, model, x, y, clip):
    for part in range(3):
        scaler.scale(loss_of(model(x[part:]), y[part:]) / 3).backward()
    clip_unscaled(scaler, optimizer, model, x, y, clip)


def train(step, scaler_class, module, name="AdamW", bad=(1, 4), enabled=True, **options):
    model, batches = model_and_batches()
    optimizer = getattr(module, name)(model.parameters(), lr=0.05, **options)
    scaler = scaler_class("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=2, enabled=enabled)
    clip = torch.nn.utils.clip_grad_norm_ if scaler_class is torch.amp.GradScaler else fa.clip_grad_norm_
    history = []
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        if i in bad and enabled:
            x = x.clone()
            x[-1, 3] = INF
        step(scaler, optimizer, model, x, y, clip)
        scaler.update()
        history.append((scaler.get_scale(), scaler.state_dict()))
        if scaler_class is fa.GradScaler and enabled:
            assert scaler.last_step_skipped.item() == (i in bad)
    return history, model


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize(("name", "options"), [(name, RULES[name].varied) for name in IN_TORCH])
@pytest.mark.parametrize("module", [torch.optim, fo], ids=["torch_optim", "flatout_optim"])
@pytest.mark.parametrize("step", [plain, clip_while_scaled, clip_unscaled, penalise, accumulate])
def test_loops_of_torchs_documentation_give_torchs_result(step, module, name, options, enabled):
    expected, theirs = train(step, torch.amp.GradScaler, torch.optim, name, enabled=enabled, **options)
    result, ours = train(step, fa.GradScaler, module, name, enabled=enabled, **options)
    assert result == expected
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", IN_TORCH)
def test_autocast_with_fused_optimizers_in_both_orders(name, dtype, unscale_first):
    def run(scaler_class, optimizer_class, **options):
        model, batches = model_and_batches()
        optimizer = optimizer_class(model.parameters(), lr=0.05, **options)
        scaler = scaler_class("cpu", init_scale=128.0)
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = loss_of(model(x), y)
            scaler.scale(loss).backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return list(model.parameters())

    theirs = run(torch.amp.GradScaler, getattr(torch.optim, name), fused=True)
    for ours in (
        run(fa.GradScaler, getattr(torch.optim, name), fused=True),
        run(fa.GradScaler, getattr(fo, name)),
        run(torch.amp.GradScaler, getattr(fo, name)),
    ):
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_sixteen_bits_in_the_lazy_form(dtype):
    """Gradients are unscaled in float32. 1.25 x 2^-24, which rounds to 2^-24 in float16, reaches the step exactly."""
    p = torch.nn.Parameter(torch.zeros(33, dtype=dtype))
    optimizer = fo.SGD([p], lr=1024.0)
    scaler = fa.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    small = 1.25 * 2.0**-24
    p.grad = torch.full((33,), small * 2**16, dtype=dtype)
    scaler.step(optimizer, max_grad_norm=1.0)
    assert (p == -small * 1024).all()
    scaler.update()
    if dtype == torch.float16:
        for what in (scaler.unscale_, lambda o: scaler.step(torch.optim.SGD([p]), max_grad_norm=1.0)):
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                what(optimizer)
        assert (p.grad == small * 2**16).all()
    else:
        scaler.unscale_(optimizer)
        assert (p.grad == small).all()


# ---- several optimizers ----------------------------------------------------------------------------------------------

FORMS = ["plain", "clipped", "eager"]


def run_history(steps, modules, names, growth_interval, scaler_class):
    """Train several optimizers with one loss and one scaler.

    Each step is a pair: (form, factor of the loss) of each optimizer, and the order of the optimizers.
    """
    params = [[torch.nn.Parameter(torch.linspace(-1, 1, 5 + 40 * i)) for _ in range(2)] for i in range(len(names))]
    optimizers = [getattr(m, n)(p, lr=0.1) for m, n, p in zip(modules, names, params, strict=True)]
    scaler = scaler_class("cpu", init_scale=8.0, growth_interval=growth_interval)
    history = []
    for step in steps:
        loss = sum((p * p).sum() * factor for ps, (_, factor) in zip(params, step[0], strict=True) for p in ps)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        torchs = scaler_class is torch.amp.GradScaler
        order = [step[1][i % len(step[1])] % len(optimizers) for i in range(len(optimizers))]
        order = list(dict.fromkeys([*order, *range(len(optimizers))]))
        forms = ["eager" if torchs and form == "clipped" else form for form, _ in step[0]]
        for i in order:
            if forms[i] == "eager":
                scaler.unscale_(optimizers[i])
                (torch.nn.utils if torchs else fa).clip_grad_norm_(params[i], 0.5)
        for i in order:
            if forms[i] == "clipped":
                scaler.step(optimizers[i], max_grad_norm=0.5)
            else:
                scaler.step(optimizers[i])
            if not torchs:
                skipped = not math.isfinite(step[0][i][1])
                assert scaler.last_step_skipped.item() == skipped
        scaler.update(step[2])
        if not torchs:
            assert scaler.last_step_skipped.item() == skipped, "what update adds up is not what we show"
        history.append(scaler.state_dict())
    return history, params


@settings(max_examples=120, deadline=None)
@given(data=st.data(), count=st.integers(1, 3), growth_interval=st.integers(0, 3))
def test_any_history_of_any_optimizers_gives_torchs_scales_and_parameters(data, count, growth_interval):
    step = st.tuples(
        st.lists(
            st.tuples(st.sampled_from(FORMS), st.sampled_from([1.0, 3.0, INF, NAN])), min_size=count, max_size=count
        ),
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
        st.sampled_from([None, None, None, 32.0]),
    )
    steps = data.draw(st.lists(step, min_size=1, max_size=8))
    names = data.draw(st.lists(st.sampled_from(["AdamW", "SGD"]), min_size=count, max_size=count))
    modules = data.draw(st.lists(st.sampled_from([torch.optim, fo]), min_size=count, max_size=count))
    expected, theirs = run_history(steps, [torch.optim] * count, names, growth_interval, torch.amp.GradScaler)
    history, ours = run_history(steps, modules, names, growth_interval, fa.GradScaler)
    assert history == expected
    for ps, qs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ps, qs, rtol=1e-4, atol=1e-5)


# ---- state of the scaler ---------------------------------------------------------------------------------------------


def test_last_step_skipped_is_none_until_there_was_a_step():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = fo.SGD([p], lr=0.1), fa.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    assert scaler.last_step_skipped is None
    scaler.step(optimizer)
    skipped = scaler.last_step_skipped
    assert (skipped.dtype, skipped.shape, skipped.device) == (torch.bool, (), p.device)
    scaler.update()
    assert scaler.last_step_skipped is skipped
    assert not skipped
    assert copy.deepcopy(scaler).last_step_skipped is None
    off = fa.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    assert off.last_step_skipped is None


def test_state_dict_is_torchs_before_and_after_first_use():
    def scaler(cls, **options):
        return cls("cpu", **options)

    for used in (False, True):
        source, target = scaler(torch.amp.GradScaler, init_scale=3.0, growth_factor=4.0), scaler(fa.GradScaler)
        source.load_state_dict(source.state_dict() | {"_growth_tracker": 2})
        if used:
            for s in (source, target):
                s.scale(torch.ones(()))
        assert target.state_dict().keys() == source.state_dict().keys()
        target.load_state_dict(source.state_dict())
        assert target.state_dict() == source.state_dict()
        target.scale(torch.ones(()))
        assert (target.state_dict()["scale"], target.state_dict()["_growth_tracker"]) == (3.0, 2)


class Renamed(fa.GradScaler):
    """Subclass that a user defines."""

    def __init__(self, *args, note, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note


def test_subclasses_copy_and_go_on():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = fo.AdamW([p]), Renamed("cpu", note="mine", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        copy.deepcopy(scaler)
    scaler.update()
    clone = copy.deepcopy(scaler)
    assert (type(clone), clone.note, clone.state_dict()) == (Renamed, "mine", scaler.state_dict())
    clone.scale(p.sum()).backward()
    clone.step(optimizer)
    clone.update()
    assert clone.state_dict()["_growth_tracker"] == 2


def test_a_users_own_grad_scale_is_used_once_in_either_stage():
    """A pipeline may also scale its gradients itself. torch's fused optimizers then divide by both scales."""
    results = []
    for scaler_class, make in (
        (torch.amp.GradScaler, lambda p: torch.optim.AdamW([p], lr=0.1, fused=True)),
        (fa.GradScaler, lambda p: fo.AdamW([p], lr=0.1)),
    ):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 20))
        optimizer, scaler = make(p), scaler_class("cpu", init_scale=16.0)
        for unscale_first in (False, True, False):
            optimizer.zero_grad()
            optimizer.grad_scale = torch.tensor(4.0)
            scaler.scale((p * p).sum() * 4).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            assert not hasattr(optimizer, "grad_scale")
            scaler.update()
        results.append(p.detach())
    torch.testing.assert_close(*results)


def test_a_step_takes_no_argument_that_it_would_lose():
    p = torch.nn.Parameter(torch.ones(3))
    ours, theirs = fo.SGD([p], lr=0.1), torch.optim.SGD([p], lr=0.1)
    off = fa.GradScaler("cpu", enabled=False)
    assert off.step(ours, lambda: torch.tensor(5.0)) == 5
    for optimizer in (ours, theirs):
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            off.step(optimizer, lambda: torch.tensor(5.0), max_grad_norm=1.0)
    assert (p == 1).all()

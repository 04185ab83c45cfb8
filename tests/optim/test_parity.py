"""Steps equal torch.optim's for-loop implementation, whatever the dtype, size and option."""

from __future__ import annotations

import pytest
import torch

import flatout.optim as fo
from flatout.optim import update
from tests.optim.helpers import assert_same, parameters, set_grads, state_of, step_both, twins
from tests.optim.rules import IN_TORCH, NAMES, RULES

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ADAM = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.05, "maximize": True, "betas": (0.8, 0.95)},
    {"lr": torch.tensor(3e-3, dtype=torch.float64), "eps": 1e-6},
    {"betas": (0.0, 0.0)},
]
SGD = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
    {"momentum": 0.5, "lr": torch.tensor(3e-2, dtype=torch.float64)},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ADAM, ids=lambda o: ",".join(o) or "defaults")
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_equals_torch(name, options, dtype):
    reference, optimizer, theirs, ours = twins(name, dtype, **{"lr": 1e-2, **options})
    for step in range(4):
        step_both(reference, optimizer, step)
    assert_same(theirs, ours, dtype)
    for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])):
        assert_same(state_of(reference, key), state_of(optimizer, key), dtype)
    assert all(s == 4 for s in state_of(optimizer, "step"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", SGD, ids=lambda o: ",".join(o) or "defaults")
def test_sgd_equals_torch(options, dtype):
    reference, optimizer, theirs, ours = twins("SGD", dtype, **{"lr": 1e-2, **options})
    for step in range(4):
        step_both(reference, optimizer, step)
    assert_same(theirs, ours, dtype)
    if options.get("momentum"):
        assert_same(state_of(reference, "momentum_buffer"), state_of(optimizer, "momentum_buffer"), dtype)


fuses = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch rounds differently on this CPU"
)


@fuses
@pytest.mark.parametrize("options", SGD, ids=lambda o: ",".join(o) or "defaults")
def test_sgd_has_the_bits_of_torch(options):
    reference, optimizer, theirs, ours = twins("SGD", torch.float32, **{"lr": 1e-2, **options})
    for step in range(4):
        step_both(reference, optimizer, step)
    for a, b in zip(theirs, ours, strict=True):
        assert torch.equal(a, b)


@fuses
@pytest.mark.parametrize("options", ADAM, ids=lambda o: ",".join(o) or "defaults")
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adams_moments_have_the_bits_of_torch(name, options):
    reference, optimizer, theirs, ours = twins(name, torch.float32, **{"lr": 1e-2, **options})
    for step in range(4):
        for a, b in zip(theirs, ours, strict=True):  # coupled decay makes the moments depend on the weights
            b.data.copy_(a)
        step_both(reference, optimizer, step)
    for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])):
        for a, b in zip(state_of(reference, key), state_of(optimizer, key), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("scale", [None, 1.0, 1024.0])
def test_update_equals_unscale_clip_step(name, max_norm, scale):
    reference, optimizer, theirs, ours = twins(name, torch.float32, lr=1e-2)
    for step in range(3):
        set_grads(theirs, step), set_grads(ours, step, scale or 1.0)
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm if max_norm is not None else float("inf"))
        reference.step()
        before = [p.grad.clone() for p in ours]
        result = update(optimizer, inv_scale=scale and torch.tensor(1 / scale), max_grad_norm=max_norm)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True)), "lazy: grads untouched"
        if result.grad_norm is not None:
            torch.testing.assert_close(result.grad_norm, norm)
            assert result.found_inf == 0
    assert_same(theirs, ours, torch.float32)


def test_update_without_need_looks_at_nothing():
    _, optimizer, _, ours = twins("SGD", torch.float32, lr=1.0)
    before = [p.detach().clone() for p in ours]
    for p in ours:
        p.grad = torch.ones_like(p)
    assert update(optimizer, inv_scale=0.25) == fo.UpdateResult(None, None)
    for p, b in zip(ours, before, strict=True):
        torch.testing.assert_close(p.detach(), b - 0.25)


@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_changes_nothing(name, bad):
    _, optimizer, _, ours = twins(name, torch.float32, **RULES[name].varied)
    set_grads(ours, 0), optimizer.step()
    before = [p.detach().clone() for p in ours]
    state = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
    set_grads(ours, 1)
    ours[6].grad[-1] = bad
    result = update(optimizer, inv_scale=torch.tensor(0.5), max_grad_norm=1.0)
    assert result.found_inf == 1
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))
    for now, then in zip(optimizer.state.values(), state, strict=True):
        assert all(torch.equal(now[k], then[k]) for k in then)


def test_clipping_alone_does_not_hide_infinities():
    _, optimizer, _, ours = twins("SGD", torch.float32)
    set_grads(ours, 0)
    ours[0].grad[0] = float("inf")
    assert update(optimizer, max_grad_norm=1.0).found_inf == 1
    assert ours[0].isnan().all(), "inf x 0, as after torch's clip_grad_norm_"


def test_an_optimizer_that_is_not_ours_means_the_same():
    theirs, ours = parameters(torch.float32), parameters(torch.float32)
    foreign, native = torch.optim.Adagrad(theirs, lr=0.1), torch.optim.Adagrad(ours, lr=0.1)
    set_grads(theirs, 0), set_grads(ours, 0, 8.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    foreign.step()
    update(native, inv_scale=torch.tensor(1 / 8), max_grad_norm=1.0)
    assert_same(theirs, ours, torch.float32)
    before = [p.detach().clone() for p in ours]
    ours[0].grad[0] = float("nan")
    assert update(native, inv_scale=torch.tensor(1.0)).found_inf == 1
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_torch_optimizers_are_skipped_too(fused):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9, fused=fused)
    p.grad = torch.tensor([1.0, float("inf"), 1.0])
    update(optimizer, inv_scale=torch.tensor(1.0))
    p.grad = torch.ones(3)
    update(optimizer, inv_scale=torch.tensor(1.0))
    assert torch.equal(p.detach(), torch.zeros(3))


def test_mixed_dtypes_share_one_norm():
    params = [torch.nn.Parameter(torch.ones(4, dtype=d)) for d in DTYPES]
    optimizer = fo.SGD(params, lr=1.0)
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    result = update(optimizer, max_grad_norm=4.0)
    torch.testing.assert_close(result.grad_norm, torch.tensor(8.0))
    for p in params:
        torch.testing.assert_close(p.detach().float(), torch.zeros(4), atol=1e-3, rtol=0)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_senseless_norm_is_refused_before_anything_changes(value):
    _, optimizer, _, ours = twins("SGD", torch.float32, lr=1.0)
    set_grads(ours, 0)
    before = [p.detach().clone() for p in ours]
    with pytest.raises(ValueError, match=f"max_grad_norm.* {value}"):
        update(optimizer, max_grad_norm=value)
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))


def test_half_precision_step_is_rounded_once():
    """One AdamW step in float16 and bfloat16 equals the float32 step, rounded."""
    for dtype in (torch.float16, torch.bfloat16):
        low = parameters(dtype)
        high = [torch.nn.Parameter(p.detach().double()) for p in low]
        set_grads(low, 0)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.double()
        fo.AdamW(low, lr=1e-2).step()
        torch.optim.AdamW(high, lr=1e-2, foreach=False).step()
        for p, q in zip(low, high, strict=True):
            differs = (p.detach() != q.detach().to(dtype)).sum().item()
            assert differs <= 1 + p.numel() // 2000, "float32 against float64 flips a rounding only rarely"


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_weight_affects_the_same_values_as_in_torch(name, decay):
    """Without decay, the infinite weight must not enter the gradient: 0 x inf would make the moments NaN."""
    theirs, ours = (torch.nn.Parameter(torch.tensor([1.0, float("inf"), -float("inf"), 2.0] * 20)) for _ in range(2))
    options = {"lr": 0.5, "weight_decay": decay, **RULES[name].options}
    reference = RULES[name].torch_class([theirs], **options, foreach=False)
    optimizer = getattr(fo, name)([ours], **options)
    for step in range(3):
        theirs.grad, ours.grad = (torch.full_like(theirs, 1.0 + step) for _ in range(2))
        reference.step(), optimizer.step()
    for a, b in [
        (theirs, ours),
        *((value, optimizer.state[ours][key]) for key, value in reference.state[theirs].items()),
    ]:
        torch.testing.assert_close(b, a, equal_nan=True)

"""Parameters other than plain dense blocks of floats: stepped as in torch's loop, or refused unchanged."""

from __future__ import annotations

import pytest
import torch

import flatout.optim as fo
from flatout.optim.bucket import overlaps_itself
from tests.optim.harness import only_native
from tests.optim.helpers import assert_same, parameters, set_grads
from tests.optim.rules import NAMES, RULES

OPTIONS = {name: {"lr": 0.1, "weight_decay": 0.1, **rule.with_state[-1]} for name, rule in RULES.items()}


@pytest.fixture
def native():
    with only_native():
        yield


def parameter(tensor):
    return torch.nn.Parameter(tensor)


def flat(n, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype)


def every_second_column():
    return [parameter(flat(48).view(6, 8)[:, ::2])]


def transposed():
    return [parameter(flat(20).view(4, 5).t())]


def channels_last():
    return [parameter(flat(300).view(4, 3, 5, 5).to(memory_format=torch.channels_last))]


def backwards_interleaved():
    return [parameter(flat(64).as_strided((3, 4), (1, 16)))]


def cut_from_one_block():
    block = flat(30)
    return [parameter(block[:10]), parameter(block[10:25].view(3, 5)), parameter(block[25:])]


def views_between_each_other():
    block = flat(40).view(10, 4)
    return [parameter(block[:, 0]), parameter(block[:, 1:3]), parameter(block[:, 3])]


def the_same_memory():
    first = flat(12)
    return [parameter(first), parameter(first.view(3, 4)), parameter(flat(5))]


def overlapping_halves():
    block = flat(30)
    return [parameter(block[:20]), parameter(block[10:])]


def overlapping_views():
    block = flat(40).view(10, 4)
    return [parameter(block[:, :3]), parameter(block[:, 1:])]


def empty():
    return [parameter(flat(0)), parameter(flat(0).view(0, 4)), parameter(flat(3)), parameter(flat(0).view(3, 0))]


def nothing_but_empty():
    return [parameter(flat(0))]


def scalars():
    return [parameter(flat(1)[0]), parameter(flat(1))]


def one_wide_dimensions():
    return [parameter(flat(6).as_strided((1, 6), (77, 1))), parameter(flat(12)[::2].view(6, 1))]


def complex_numbers():
    return [parameter(torch.complex(flat(6), flat(6) + 1).view(2, 3)), parameter(flat(4))]


def complex_views():
    return [parameter(torch.complex(flat(12), flat(12) + 1).view(3, 4)[:, ::2])]


def complex_doubles():
    return [parameter(torch.complex(flat(6), flat(6) + 1).to(torch.complex128))]


KINDS = [
    every_second_column,
    transposed,
    channels_last,
    backwards_interleaved,
    cut_from_one_block,
    views_between_each_other,
    the_same_memory,
    overlapping_halves,
    overlapping_views,
    empty,
    nothing_but_empty,
    scalars,
    one_wide_dimensions,
    complex_numbers,
    complex_views,
    complex_doubles,
]


def gradient(p, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    shape = torch.view_as_real(p).shape if p.is_complex() else p.shape
    g = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return (torch.view_as_complex(g) if p.is_complex() else g).to(p.dtype)


@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("native")
def test_equals_torchs_loop(name, kind):
    theirs, ours = kind(), kind()
    reference = RULES[name].torch_class(theirs, foreach=False, **OPTIONS[name])
    optimizer = getattr(fo, name)(ours, **OPTIONS[name])
    for step in range(4):
        for p, q in zip(theirs, ours, strict=True):
            p.grad, q.grad = gradient(p, step), gradient(q, step, 4.0)
            if step == 1:  # strides that differ from the parameter's
                q.grad = q.grad.t().contiguous().t() if q.dim() == 2 else q.grad
            if step == 2:  # written by other code
                with torch.no_grad():
                    p.mul_(0.5), q.mul_(0.5)
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs if p.numel()] or [torch.zeros(1)])
        reference.step()
        result = fo.update(optimizer, inv_scale=torch.tensor(0.25), max_grad_norm=1e9)
        torch.testing.assert_close(result.grad_norm, norm.to(result.grad_norm.dtype))
    assert_same(theirs, ours, torch.float32)
    for p, q in zip(theirs, ours, strict=True):
        assert q.stride() == p.stride()
        assert optimizer.state[q].keys() == reference.state[p].keys()
        for key, value in reference.state[p].items():
            torch.testing.assert_close(optimizer.state[q][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("native")
def test_a_parameter_twice_in_a_group_is_stepped_twice():
    p, q = parameter(flat(5)), parameter(flat(5))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        reference, optimizer = torch.optim.Adam([p, p], foreach=False), fo.Adam([q, q])
    for step in range(3):
        p.grad, q.grad = gradient(p, step), gradient(q, step)
        reference.step(), optimizer.step()
    torch.testing.assert_close(q, p)
    assert optimizer.state[q]["step"] == 6


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_overlaps_itself_is_refused(name):
    params = [parameter(flat(3)), torch.ones(1).expand(4).requires_grad_()]
    optimizer = getattr(fo, name)(params, **OPTIONS[name])
    before = params[0].detach().clone()
    for p in params:
        p.grad = torch.ones(p.shape)
    for step in (optimizer.step, lambda: fo.update(optimizer, max_grad_norm=1.0)):
        with pytest.raises(ValueError, match=r"parameter 1 .*\(4,\)"):
            step()
    assert torch.equal(params[0].detach(), before)
    assert not optimizer.state


def test_what_overlaps_itself():
    base = torch.zeros(100)
    assert not overlaps_itself(base.as_strided((2, 3), (3, 2))), "interleaved, but apart"
    assert overlaps_itself(base.as_strided((3, 3), (2, 1)))
    assert overlaps_itself(base.as_strided((2, 2), (0, 1)))
    assert not overlaps_itself(base.as_strided((1, 2), (0, 1)))
    assert not overlaps_itself(base.as_strided((0, 2), (1, 1)))
    assert not overlaps_itself(base.view(4, 25).t())


def sparse_gradient(p):
    return torch.sparse_coo_tensor([[1, 1]], torch.ones(2, p.shape[1]), p.shape, check_invariants=True)


@pytest.mark.parametrize("dense_steps", [0, 1])
def test_sparse_gradients_take_torchs_step_and_leave_torchs_state(dense_steps):
    p, q = (parameter(torch.ones(4, 2)) for _ in range(2))
    options = {"lr": 0.1, "momentum": 0.9}
    reference, optimizer = torch.optim.SGD([p], **options), fo.SGD([q], **options)
    for step in range(3):
        p.grad, q.grad = (sparse_gradient(t) if step >= dense_steps else torch.ones(4, 2) for t in (p, q))
        reference.step(), optimizer.step()
    torch.testing.assert_close(q, p)
    assert optimizer.state[q]["momentum_buffer"].layout == reference.state[p]["momentum_buffer"].layout


def test_a_plain_update_leaves_sparse_gradients_as_they_are():
    """Coalescing adds duplicates before the step. This rounds differently from adding them during the step."""
    p = torch.nn.Parameter(torch.ones(4, 2))
    p.grad = sparse_gradient(p)
    fo.update(torch.optim.SGD([p], lr=0.1))
    assert not p.grad.is_coalesced()
    fo.update(torch.optim.SGD([p], lr=0.1), inv_scale=0.5)
    assert p.grad.is_coalesced()


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion"])
def test_sparse_gradients_are_torchs_error_elsewhere(name):
    p = parameter(torch.ones(4, 2))
    p.grad = sparse_gradient(p)
    optimizer = getattr(fo, name)([p])
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(4, 2))


@pytest.mark.parametrize("options", [{"ema_decay": 0.9}, {"low_precision_copy": torch.bfloat16}], ids=str)
def test_additional_options_are_for_the_native_step_alone(options):
    params = [parameter(torch.ones(3)), parameter(torch.ones(4, 2))]
    optimizer = fo.SGD(params, lr=0.1, **options)
    params[0].grad, params[1].grad = torch.ones(3), sparse_gradient(params[1])
    for step in (optimizer.step, lambda: fo.update(optimizer, inv_scale=0.5)):
        with pytest.raises(RuntimeError, match=next(iter(options))):
            step()
    assert torch.equal(params[0].detach(), torch.ones(3))
    assert not optimizer.state


def test_float_gradients_of_half_parameters():
    p, q = (parameter(flat(7, torch.bfloat16)) for _ in range(2))
    other = parameter(flat(7, torch.bfloat16))
    q.grad = gradient(q, 0).to(torch.bfloat16)
    fo.AdamW([q], lr=0.1).step()
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch has gradients of the parameter's dtype only")
    p.grad_dtype = torch.float32
    p.grad, other.grad = q.grad.float(), q.grad.clone()
    fo.AdamW([p, other], lr=0.1).step()
    assert torch.equal(p, q)
    assert torch.equal(other, q)


def test_mixed_groups_share_one_look():
    params = [
        parameter(torch.ones(4)),
        parameter(torch.ones(4, dtype=torch.bfloat16)),
        parameter(torch.ones(2, dtype=torch.complex64)),
        parameter(torch.ones(8)[::2]),
    ]
    optimizer = fo.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=1.0)
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    result = fo.update(optimizer, max_grad_norm=56**0.5 / 2)
    torch.testing.assert_close(result.grad_norm, torch.tensor(56**0.5))
    for p in params:
        torch.testing.assert_close(p.detach().abs().float(), torch.zeros(p.shape), atol=1e-5, rtol=0)
    params[2].grad[0] = complex("inf")
    before = [p.detach().clone() for p in params]
    assert fo.update(optimizer, inv_scale=torch.tensor(1.0)).found_inf == 1
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_gradients_are_only_read():
    params = parameters(torch.float32, [(3, 4), (5,)])
    optimizer = fo.AdamW(params)
    set_grads(params, 0)
    params[0].grad = params[0].grad.t().contiguous().t()
    before = [p.grad.clone() for p in params]
    fo.update(optimizer, inv_scale=torch.tensor(0.5), max_grad_norm=0.1)
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))


def test_a_gradient_that_waits_to_be_negated():
    """torch keeps some negations as a bit. The memory then holds the original number."""
    p, q = (parameter(torch.ones(4)) for _ in range(2))
    p.grad, q.grad = torch._neg_view(torch.ones(4)), -torch.ones(4)
    averaged = fo.AdamW([p], lr=0.1, ema_decay=0.9)
    with pytest.raises(RuntimeError, match="ema_decay"):
        averaged.step()
    assert not averaged.state
    fo.AdamW([p], lr=0.1).step()
    fo.AdamW([q], lr=0.1).step()
    torch.testing.assert_close(p, q)

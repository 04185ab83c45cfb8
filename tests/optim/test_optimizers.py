"""The torch side of the optimizers: state, hooks, closures, layouts, fallbacks, errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import flatout.optim as fo
from tests.optim.helpers import parameters, set_grads, twins

ALL = [("AdamW", {"amsgrad": True}), ("Adam", {}), ("SGD", {"momentum": 0.9, "dampening": 0.2})]


def same_state_dict(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key in a["state"]:
        assert a["state"][key].keys() == b["state"][key].keys()
        for name, value in a["state"][key].items():
            other = b["state"][key][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert getattr(value, "dtype", None) == getattr(other, "dtype", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), ALL, ids=lambda v: v if isinstance(v, str) else "")
def test_state_dict_round_trips_bit_exactly_both_ways(name, options, dtype):
    theirs, mine = (getattr(m, name)(parameters(dtype), **options) for m in (torch.optim, fo))
    for source, target in ((theirs, mine), (mine, theirs)):
        set_grads(source.param_groups[0]["params"], 0)
        source.step()
        saved = copy.deepcopy(source.state_dict())
        target.load_state_dict(saved)
        same_state_dict(target.state_dict(), saved)
        set_grads(target.param_groups[0]["params"], 1)
        target.step()  # and it goes on from there


@pytest.mark.parametrize(("name", "options"), ALL, ids=lambda v: v if isinstance(v, str) else "")
def test_pickle_and_deepcopy_keep_class_and_state(name, options):
    optimizer = getattr(fo, name)(parameters(torch.float32), **options)
    set_grads(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    for clone in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(clone) is type(optimizer)
        same_state_dict(clone.state_dict(), optimizer.state_dict())
        set_grads(clone.param_groups[0]["params"], 1)
        clone.step()


def test_closure_hooks_and_groups():
    p, q = parameters(torch.float32, [(3,), (4,)])
    optimizer = fo.AdamW([p])
    optimizer.add_param_group({"params": [q], "lr": 0.5, "weight_decay": 0.0})
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = (q**2).sum()
        loss.backward()
        return loss

    before = p.detach().clone(), q.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx((before[1] ** 2).sum().item())
    assert calls == ["before", "after"]
    assert torch.equal(p, before[0]), "no gradient, no change"
    assert p not in optimizer.state
    torch.testing.assert_close((before[1] - q).abs().detach(), torch.full((4,), 0.5))


def test_a_step_is_seen_by_autograd():
    p = torch.nn.Parameter(torch.ones(3))
    out = (p * p).sum()
    p.grad = torch.ones(3)
    fo.SGD([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_layouts(name):
    """Channels-last parameters, gradients and moments of other strides, strided views: all right."""
    options = {"lr": 0.1} if name == "AdamW" else {"lr": 0.1, "momentum": 0.9}
    start = torch.randn(4, 3, 5, 5)
    base = torch.randn(6, 8)

    def run(module, make):
        params = [torch.nn.Parameter(make(start.clone())), torch.nn.Parameter(base.clone()[:, ::2])]
        optimizer = getattr(module, name)(params, **options)
        for step in range(4):
            if step == 2:  # strides change under the moments
                params[0].data = params[0].data.contiguous()
            set_grads(params, step)
            if step == 1:
                params[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
            optimizer.step()
        return params

    channels_last = lambda t: t.contiguous(memory_format=torch.channels_last)  # noqa: E731
    for a, b in zip(run(torch.optim, channels_last), run(fo, channels_last), strict=True):
        torch.testing.assert_close(b, a)


def test_complex_parameters_take_torchs_step():
    theirs, ours = (torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2))
    theirs.grad, ours.grad = torch.full_like(theirs, 1j), torch.full_like(ours, 2j)
    torch.optim.AdamW([theirs], lr=0.1).step()
    calls = []
    optimizer = fo.AdamW([ours], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    fo.update(optimizer, inv_scale=torch.tensor(0.5), max_grad_norm=1e9)
    torch.testing.assert_close(ours, theirs)
    assert calls == [1], "hooks run once although torch's step is hooked itself"
    ours.grad = torch.full_like(ours, complex("nan"))
    assert fo.update(optimizer, inv_scale=torch.tensor(0.5)).found_inf == 1
    torch.testing.assert_close(ours, theirs)


def test_sparse_gradients_take_torchs_step():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    fo.update(fo.SGD(embedding.parameters(), lr=1.0), inv_scale=torch.tensor(0.5))
    expected = before - torch.tensor([0, 1.0, 0, 0.5, 0])[:, None]
    torch.testing.assert_close(embedding.weight.detach(), expected)


def test_differentiable_is_refused():
    p = parameters(torch.float32, [(3,)])
    with pytest.raises(ValueError, match=r"differentiable must be False for flatout.optim.AdamW, got True"):
        fo.AdamW(p, differentiable=True)


def test_flags_that_make_no_difference():
    for flags in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        _, optimizer, _, ours = twins("SGD", torch.float32)
        optimizer = fo.SGD(ours, **flags)
        set_grads(ours, 0)
        optimizer.step()


def test_operators_name_the_argument_that_is_wrong():
    p, other = torch.ones(4), torch.ones(5)
    ops = torch.ops.flatout
    options = dict(lr=0.1, lr_tensor=None, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)
    options |= dict(maximize=False, grad_factor=None, found_inf=None)
    for lists, message in [
        (([p], [other], [], []), r"grads\[0\] must have the shape and strides of params\[0\]"),
        (([p], [p, p], [], []), r"grads must hold as many tensors as params \(1\), got 2"),
        (([p], [p.double()], [], []), r"grads\[0\] must have the dtype of params\[0\]"),
        (([p.int()], [p], [], []), "params must be float32, float64, float16 or bfloat16"),
        (([torch.ones(4, 4)[:, ::2]], [p], [], []), r"params\[0\] must be dense"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.sgd_(*lists, **options)
    with pytest.raises(RuntimeError, match="max_norm must be >= 0, got -1"):
        ops.unscale_and_check([p], None, -1.0)
    assert torch.equal(p, torch.ones(4))


def test_betas_that_only_the_device_knows_are_torchs():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fo.AdamW([p])
    assert optimizer._collect() is not None
    optimizer.param_groups[0]["betas"] = (torch.empty((), device="meta"),) * 2
    assert optimizer._collect() is None

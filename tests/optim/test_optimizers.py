"""Torch interface of the optimizers: state, hooks, closures, layouts, fallbacks, errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import flatout.optim as fo
from flatout.optim.native_step import NativeStep
from tests.optim.harness import only_native
from tests.optim.helpers import parameters, set_grads
from tests.optim.rules import IN_TORCH, NAMES, RULES

VARIED = [(name, RULES[name].varied) for name in IN_TORCH]


def same_state_dict(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key in a["state"]:
        assert a["state"][key].keys() == b["state"][key].keys()
        for name, value in a["state"][key].items():
            other = b["state"][key][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert getattr(value, "dtype", None) == getattr(other, "dtype", None)


def test_the_table_of_rules_has_every_optimizer():
    exported = (value for value in vars(fo).values() if isinstance(value, type) and issubclass(value, NativeStep))
    assert {cls.__name__: cls._torch_class for cls in exported} == {k: rule.torch_class for k, rule in RULES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), VARIED, ids=lambda v: v if isinstance(v, str) else "")
def test_state_dict_round_trips_bit_exactly_both_ways(name, options, dtype):
    theirs, mine = (getattr(m, name)(parameters(dtype), **options) for m in (torch.optim, fo))
    for source, target in ((theirs, mine), (mine, theirs)):
        set_grads(source.param_groups[0]["params"], 0)
        source.step()
        saved = copy.deepcopy(source.state_dict())
        target.load_state_dict(saved)
        same_state_dict(target.state_dict(), saved)
        set_grads(target.param_groups[0]["params"], 1)
        target.step()  # the loaded optimizer continues


@pytest.mark.parametrize(("name", "options"), VARIED, ids=lambda v: v if isinstance(v, str) else "")
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
    """The parameters have channels-last or strided memory. Gradients and moments have other strides."""
    options = {"lr": 0.1} if name == "AdamW" else {"lr": 0.1, "momentum": 0.9}
    start = torch.randn(4, 3, 5, 5)
    base = torch.randn(6, 8)

    def run(module, make):
        params = [torch.nn.Parameter(make(start.clone())), torch.nn.Parameter(base.clone()[:, ::2])]
        optimizer = getattr(module, name)(params, **options)
        for step in range(4):
            if step == 2:  # strides of the parameter change, but not those of the moments
                params[0].data = params[0].data.contiguous()
            set_grads(params, step)
            if step == 1:
                params[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
            optimizer.step()
        return params

    channels_last = lambda t: t.contiguous(memory_format=torch.channels_last)  # noqa: E731
    for a, b in zip(run(torch.optim, channels_last), run(fo, channels_last), strict=True):
        torch.testing.assert_close(b, a)


def test_complex_parameters_equal_torchs():
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


def test_a_kept_gradient_of_another_shape_is_refused():
    p = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = fo.SGD([p], lr=1.0)
    p.grad = torch.ones(2, 3)
    optimizer.step()
    p.data = p.data.view(3, 2)
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()


def test_differentiable_is_refused():
    p = parameters(torch.float32, [(3,)])
    with pytest.raises(ValueError, match=r"differentiable.*AdamW.* True"):
        fo.AdamW(p, differentiable=True)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name in NAMES
        for option, value in getattr(fo, name)([torch.ones(1)]).defaults.items()
        if option != "lr" and type(value) in (int, float, tuple)
    ],
)
def test_numbers_that_only_the_device_knows_are_torchs(name, option):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = getattr(fo, name)([p])
    with only_native():
        optimizer.step()
    number = torch.empty((), device="meta")
    optimizer.param_groups[0][option] = (number, number) if option == "betas" else number
    with only_native(), pytest.raises(AssertionError, match="torch's own step"):
        optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_a_compiled_function_may_step(name):
    """The step runs after a graph break, because the step is a single native call."""

    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = getattr(fo, name)(model.parameters(), lr=0.1)

        def train(x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        train = torch.compile(train, backend="aot_eager") if compiled else train
        return [train(torch.randn(5, 4)) for _ in range(4)]

    torch._dynamo.reset()
    torch.testing.assert_close(run(True), run(False))

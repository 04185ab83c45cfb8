"""Changes between two steps of an optimizer. The native step continues and equals torch's."""

from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch

import flatout.optim as fo
from tests.optim.harness import Calls, only_native
from tests.optim.helpers import assert_same, parameters, saved_state, set_grads
from tests.optim.rules import NAMES, RULES

SHAPES = [(3,), (5, 7), (0,), (8, 8)]
OPTIONS = {name: {"lr": 1e-2, **rule.varied} for name, rule in RULES.items()}


@pytest.fixture(autouse=True)
def _native():
    with only_native():
        yield


def some_gradients(optimizer, params, step):
    set_grads(params, step)
    for i, p in enumerate(params):
        if (step + i) % 3 == 0:
            p.grad = None


def replace_a_parameter(optimizer, params, step):
    if step == 2:
        params[0] = optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(3))


def reorder(optimizer, params, step):
    if step == 2:
        params.reverse(), optimizer.param_groups[0]["params"].reverse()


def add_a_group(optimizer, params, step):
    if step == 2:
        params.append(torch.nn.Parameter(torch.ones(9)))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})


def replace_the_state(optimizer, params, step):
    if step == 2:
        optimizer.state = copy.copy(optimizer.state)
        optimizer.state[params[1]] = {k: v.clone() for k, v in optimizer.state[params[1]].items()}


def replace_an_entry(optimizer, params, step):
    state = optimizer.state[params[1]]
    key = next((k for k in ("exp_avg", "momentum_buffer") if k in state), None)
    if step == 2:
        state[key] = state[key] * 2


def write_an_entry(optimizer, params, step):
    for state in optimizer.state.values():
        for key in state.keys() - {"step"}:
            state[key].mul_(0.5)


def clear_the_state(optimizer, params, step):
    if step == 2:
        optimizer.state.clear()


def reload(optimizer, params, step):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def new_memory(optimizer, params, step):
    for p in params:
        p.data = p.data.clone()


def new_strides(optimizer, params, step):
    params[1].data = params[1].data.t().contiguous().t() if step % 2 else params[1].data.contiguous()


def new_strides_in_the_same_memory(optimizer, params, step):
    if step == 2:
        params[3].data = params[3].data.t()
        params[3].grad = params[3].grad.t()


def swapped_tensors(optimizer, params, step):
    if step == 2:
        grad, params[1].grad = params[1].grad, None
        torch.utils.swap_tensors(params[1], torch.nn.Parameter(params[1].detach() + 1))
        params[1].grad = grad


def transposed_under_a_gradient(optimizer, params, step):
    if step == 2:
        params[3].data = params[3].data.t()


def other_options(optimizer, params, step):
    group = optimizer.param_groups[0]
    group["lr"] = 0.01 * (step + 1)
    group["weight_decay"] = 0.1 * step
    if "amsgrad" in group:
        group["betas"] = (0.8, 0.9)
    if "momentum" in group:
        group["momentum"] = 0.8
        group["dampening"] = 0.0 if step > 2 else 0.3


CHANGES = [
    some_gradients,
    replace_a_parameter,
    reorder,
    add_a_group,
    replace_the_state,
    replace_an_entry,
    write_an_entry,
    clear_the_state,
    reload,
    new_memory,
    new_strides,
    new_strides_in_the_same_memory,
    transposed_under_a_gradient,
    swapped_tensors,
    other_options,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_change_between_steps(name, change):
    def run(cls, **options):
        params = parameters(torch.float32, SHAPES)
        optimizer = cls(list(params), **options, **OPTIONS[name])
        for step in range(5):
            set_grads(params, step)
            change(optimizer, params, step)
            for p in params:
                if p.grad is None and change is not some_gradients:
                    p.grad = torch.ones_like(p)
            optimizer.step()
        return optimizer, params

    reference, theirs = run(RULES[name].torch_class, foreach=False)
    optimizer, ours = run(getattr(fo, name))
    assert_same(theirs, ours, torch.float32)
    assert [p in reference.state for p in theirs] == [p in optimizer.state for p in ours]
    for parameter in optimizer.state.keys() - set(
        ours
    ):  # torch cannot save the state of a parameter outside all groups
        del optimizer.state[parameter]
    for p, q in zip(theirs, ours, strict=True):
        kept = saved_state(optimizer, q)
        assert kept.keys() == reference.state[p].keys()
        assert_same(reference.state[p].values(), kept.values(), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_may_move_between_groups(name):
    def run(cls):
        params = parameters(torch.float32, SHAPES)
        optimizer = cls([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}], **OPTIONS[name])
        first, second = optimizer.param_groups
        for step in range(4):
            set_grads(params, step)
            if step == 2:
                second["params"].insert(0, first["params"].pop())
                second["params"].insert(0, first["params"].pop())
            optimizer.step()
        return params

    assert_same(run(RULES[name].torch_class), run(getattr(fo, name)), torch.float32)


def test_a_parameter_may_get_another_dtype_in_the_same_memory():
    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = fo.SGD([p], lr=1.0)
    p.grad = torch.ones(8)
    optimizer.step()
    p.grad = None
    p.data = torch.ones(16, dtype=torch.bfloat16).set_(p.data.untyped_storage(), 0, (8,)).fill_(2)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(8, dtype=torch.bfloat16))


def expired(tensor):
    return functools.partial(torch.UntypedStorage._expired, tensor.untyped_storage()._weak_ref())


def test_gradients_are_not_held():
    """No gradient stays referenced after a step that a hook refused, the native core refused, or torch's class took."""
    for failure in ("hook", "native", "sparse"):
        p, q = parameters(torch.float32, [(3,), (4,)])
        optimizer = fo.SGD([p, q], lr=1.0)
        set_grads([p, q], 0)
        optimizer.step()
        set_grads([p, q], 1)
        if failure == "hook":
            optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fo.update(optimizer, max_grad_norm=1.0)
        elif failure == "native":
            optimizer.grad_scale = torch.ones(2)
            with pytest.raises(RuntimeError):
                optimizer.step()
        else:
            q.grad = q.grad.to_sparse()
            with pytest.raises(AssertionError, match="torch's own step"):
                optimizer.step()
        freed = expired(p.grad)
        optimizer.zero_grad()
        assert freed(), failure


def test_release_lets_go_of_memory():
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = fo.AdamW([p])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
        freed = expired(p), expired(optimizer.state[p]["exp_avg"])
        p.data = p.data.clone()
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
        optimizer.release()
        assert freed[0]()
        assert freed[1]()


def test_a_parameter_gets_its_state_with_its_first_gradient():
    params = parameters(torch.float32, SHAPES)
    optimizer = fo.AdamW(params)
    for i in (1, 0):
        optimizer.zero_grad()
        params[i].grad = torch.ones_like(params[i])
        optimizer.step()
        assert [p in optimizer.state for p in params] == [i == 0, True, False, False]
    assert [optimizer.state[p]["step"].item() for p in params[:2]] == [1, 1]


def test_a_state_that_was_cleared_begins_with_the_next_gradient():
    params = parameters(torch.float32, SHAPES)
    optimizer = fo.AdamW(params)
    set_grads(params, 0)
    optimizer.step()
    optimizer.state.clear()
    params[1].grad = None
    optimizer.step()
    assert [p in optimizer.state for p in params] == [True, False, True, True]


def test_alternating_parameters_keep_their_buckets():
    params = parameters(torch.float32, SHAPES)
    optimizer = fo.AdamW(params)
    with Calls() as calls:
        for step in range(6):
            optimizer.zero_grad()
            params[step % 2].grad = torch.ones_like(params[step % 2])
            optimizer.step()
    assert len(calls.made()) == 2
    assert [optimizer.state[p]["step"].item() for p in params[:2]] == [3, 3]


def test_buckets_are_made_once_per_dtype():
    params = parameters(torch.float32, SHAPES) + parameters(torch.bfloat16, SHAPES)
    optimizer = fo.AdamW([{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}])
    with Calls() as calls:
        for step in range(6):
            set_grads(params, step)
            if step == 3:
                params[0].grad = params[-1].grad = None
            optimizer.param_groups[0]["lr"] = 0.1 * step
            fo.update(optimizer, inv_scale=torch.tensor(0.5), max_grad_norm=1.0)
    assert len(calls.made()) == 2, "two dtypes"


def test_only_stepped_parameters_increase_their_version():
    for shape in (
        lambda t: t,
        lambda t: torch.stack([t, t], 1)[:, :1],
    ):  # the second is computed in other memory, and written back
        p, q = (torch.nn.Parameter(shape(t.detach())) for t in parameters(torch.float32, [(3,), (4,)]))
        optimizer = fo.AdamW([p, q])
        set_grads([p, q], 0)
        optimizer.step()
        before = p._version, q._version
        q.grad = None
        optimizer.step()
        assert p._version > before[0]
        assert q._version == before[1]


def test_masters_of_views_follow_a_write_before_a_step_without_a_gradient():
    p, q = (torch.nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16)[:, :1]) for _ in range(2))
    optimizer = fo.SGD([p, q], lr=0.5, master_weights="float32")
    set_grads([p, q], 0)
    optimizer.step()
    with torch.no_grad():
        q.fill_(8.0)
    q.grad = None
    optimizer.step()
    p.grad, q.grad = None, torch.ones_like(q)
    optimizer.step()
    assert (q == 7.5).all()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", NAMES)
def test_copies_go_on_by_themselves(name, clone):
    params = parameters(torch.float32, SHAPES)
    optimizer = getattr(fo, name)(params, **OPTIONS[name])
    set_grads(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    other = clone(optimizer)
    others = other.param_groups[0]["params"]
    set_grads(others, 1)
    other.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True)), "the copy steps its own parameters"
    set_grads(params, 1)
    optimizer.step()
    assert_same(params, others, torch.float32)
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True) if p.numel())


def test_buckets_are_freed_with_their_optimizer():
    params = parameters(torch.float32, SHAPES)
    with Calls() as calls:
        optimizer = fo.AdamW(params)
        set_grads(params, 0)
        optimizer.step()
        first = calls.made()
        assert first
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls.freed() == first, "a load frees the state that it replaces"
        optimizer.step()
        assert len(calls.made()) == 2 * len(first)
        del optimizer
        gc.collect()
        assert calls.freed() == calls.made()
    with pytest.raises(RuntimeError, match=f"bucket {first[0]}"):
        torch.ops.flatout.check_buckets(first[:1], None, None)


def test_pre_hooks_may_change_gradients():
    """A hook replaces one gradient and removes another, with and without a clip by the norm."""
    for look in (False, True):
        p, q = parameters(torch.float32, [(3,), (4,)])
        optimizer = fo.SGD([p, q], lr=1.0)
        set_grads([p, q], 0)
        expected = p.detach() - 1, q.detach().clone()

        def hook(*_, p=p, q=q):
            p.grad, q.grad = torch.ones(3), None

        optimizer.register_step_pre_hook(hook)
        fo.update(optimizer, max_grad_norm=1e9) if look else optimizer.step()
        torch.testing.assert_close((p.detach(), q.detach()), expected)


@pytest.mark.parametrize("patch", ["instance", "subclass", "wraps", "subclass wraps"])
def test_so_may_a_step_of_the_users(patch):
    p = torch.nn.Parameter(torch.zeros(3))

    fo.SGD([p])  # torch has wrapped the class's step by now
    wraps = functools.wraps if "wraps" in patch else lambda _: lambda f: f

    class Mine(fo.SGD):
        @wraps(fo.SGD.step)
        def step(self, closure=None):
            p.grad = torch.ones(3)
            return super().step(closure)

    optimizer = Mine([p], lr=1.0) if "subclass" in patch else fo.SGD([p], lr=1.0)
    if "subclass" not in patch:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = optimizer.step

        @wraps(step)
        def patched():
            p.grad = torch.ones(3)
            step()

        optimizer.step = patched
    p.grad = torch.full((3,), 5.0)
    fo.update(optimizer, max_grad_norm=1e9)
    assert torch.equal(p.detach(), torch.full((3,), -1.0))


def test_gradients_are_converted_once_per_update():
    params = parameters(torch.float32, SHAPES)
    optimizer = fo.AdamW(params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with Calls() as calls:
        for step in range(3):
            set_grads(params, step)
            fo.update(optimizer, inv_scale=torch.tensor(1.0), max_grad_norm=1.0)
    assert calls.count("set_grads") == 3

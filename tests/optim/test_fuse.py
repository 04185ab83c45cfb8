"""Conversion of a torch optimizer in use, and back, without visible changes."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

import flatout.optim as fo
from tests.optim.harness import Calls
from tests.optim.helpers import assert_same, parameters, set_grads
from tests.optim.rules import IN_TORCH, RULES
from tests.reasons import fusing

VARIED = [(name, RULES[name].varied) for name in IN_TORCH]


def make(name, options):
    params = parameters(torch.float32)
    return getattr(torch.optim, name)(params, lr=0.1, **options), params


@pytest.mark.parametrize("scheduler", ["before", "after", "none"])
@pytest.mark.parametrize(("name", "options"), VARIED, ids=lambda v: v if isinstance(v, str) else "")
def test_fuse_and_unfuse_in_the_middle_of_a_run(name, options, scheduler):
    def run(convert):
        optimizer, params = make(name, options)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduler == "before" else None
        for step in range(6):
            if convert and step == 2:
                assert fo.why_not_fusable(optimizer) is None
                assert fo.fuse(optimizer) is optimizer
                assert type(optimizer) is getattr(fo, name)
            if convert and step == 4:
                assert type(fo.unfuse(optimizer)) is getattr(torch.optim, name)
            if scheduler == "after" and step == 3:
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            set_grads(params, step)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        assert len(calls) == 6
        return optimizer, params

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it misses optimizer.step()
        (reference, theirs), (optimizer, ours) = run(False), run(True)
    assert_same(theirs, ours, torch.float32)
    assert reference.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert reference.__dict__.keys() == optimizer.__dict__.keys()
    assert [s.keys() for s in reference.state.values()] == [s.keys() for s in optimizer.state.values()]


@pytest.mark.parametrize("when", ["before", "after"])
def test_native_step_runs_under_a_scheduler(when):
    optimizer, params = make("AdamW", {})
    if when == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fo.fuse(optimizer)
    if when == "after":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    set_grads(params, 0)
    with Calls() as calls:
        optimizer.step()
    assert calls.count("step_bucket_") == 1
    assert optimizer._opt_called


def test_pickle_and_deepcopy_of_a_fused_optimizer():
    optimizer, params = make("AdamW", {})
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    set_grads(params, 0)
    fo.fuse(optimizer).step()
    for clone in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(clone) is torch.optim.AdamW
        assert str(clone.state_dict()) == str(optimizer.state_dict())
        set_grads(clone.param_groups[0]["params"], 1)
        clone.step()
    assert b"flatout" not in pickle.dumps(optimizer)


def test_unfuse_restores_the_very_step_object():
    optimizer, _ = make("SGD", {})
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = dict(optimizer.__dict__)
    fo.unfuse(fo.fuse(optimizer))
    assert optimizer.__dict__ == before
    assert optimizer.__dict__["step"] is before["step"]
    fo.unfuse(optimizer)  # no effect, because there is nothing to undo


def test_why_not():
    params = parameters(torch.float32, [(3,)])

    class Mine(torch.optim.AdamW):
        pass

    class Wrapped(torch.Tensor):
        pass

    patched = torch.optim.SGD(params)
    patched.step = lambda: None
    cases = [
        ("no-native-form", torch.optim.LBFGS(params)),
        ("no-native-form", Mine(params)),
        ("is-native", fo.SGD(params)),
        ("step-is-wrapped", patched),
        ("differentiable", torch.optim.SGD(params, differentiable=True)),
        ("unknown-tensors", torch.optim.SGD([torch.ones(2).as_subclass(Wrapped)])),
        ("no-kernels", torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device="meta"))])),
    ]
    for code, optimizer in cases:
        assert fusing(fo.why_not_fusable(optimizer)) == {code}
        kind = type(optimizer)
        assert type(fo.fuse(optimizer)) is kind

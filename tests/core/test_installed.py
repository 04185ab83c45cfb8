"""Code that others have installed in torch and in Python runs in steps, and its state is restored."""

import contextlib
import cProfile
import functools
import pstats
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)
from torch.overrides import TorchFunctionMode

from flatout.core.installed import installed, without_profilers
from flatout.core.reachable import module_of
from flatout.core.snapshot import Snapshot
from flatout.core.step_hooks import before_steps


@contextlib.contextmanager
def replaced(owner, name, value):
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def counted(function, calls, wraps=functools.wraps):
    @wraps(function)
    def counting(*args, **kwargs):
        calls[0] += 1
        return function(*args, **kwargs)

    return counting


def module_hook(calls, optimizer):
    return nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))


def step_hook(calls, optimizer):
    return register_optimizer_step_post_hook(lambda *_: calls.append(1))


def patched_loss(calls, optimizer):
    return replaced(nn.functional, "mse_loss", counted(nn.functional.mse_loss, calls))


def patched_loss_without_wraps(calls, optimizer):
    return replaced(nn.functional, "mse_loss", counted(nn.functional.mse_loss, calls, lambda _: lambda same: same))


def patched_loss_by_an_object(calls, optimizer):
    class Counted:
        def __init__(self):
            self.mse_loss = nn.functional.mse_loss

        def __call__(self, *args):
            calls[0] += 1
            return self.mse_loss(*args)

    return replaced(nn.functional, "mse_loss", Counted())


def patched_loss_by_partial(calls, optimizer):
    def counting(held, function, *args):
        held[0] += 1
        return function(*args)

    return replaced(nn.functional, "mse_loss", functools.partial(counting, calls, nn.functional.mse_loss))


def patched_backward(calls, optimizer):
    return replaced(torch.Tensor, "backward", counted(torch.Tensor.backward, calls))


def patched_step(calls, optimizer):
    return replaced(optimizer, "step", counted(optimizer.step, calls))


def patched_step_of_the_class(calls, optimizer):
    return replaced(torch.optim.SGD, "step", counted(torch.optim.SGD.step, calls))


def mode(calls, optimizer):
    class Counting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(1)
            return function(*args, **(kwargs or {}))

    return Counting()


def packing(calls, optimizer):
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (calls.append(1), tensor)[1], lambda tensor: tensor)


INSTALLED = [
    module_hook,
    step_hook,
    patched_loss,
    patched_loss_without_wraps,
    patched_loss_by_an_object,
    patched_loss_by_partial,
    patched_backward,
    patched_step,
    patched_step_of_the_class,
    mode,
    packing,
]


@pytest.mark.parametrize("install", INSTALLED)
def test_what_installed_code_counts_is_restored(install):
    model, calls = nn.Linear(2, 1), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with install(calls, optimizer):
        snapshot = Snapshot.capture([model], optimizer, code=[model])
        before = list(calls)
        nn.functional.mse_loss(model(torch.ones(2, 2)), torch.ones(2, 1)).backward()
        optimizer.step()
        assert calls != before
        snapshot.restore()
        assert calls == before


def test_nothing_of_torch_and_flatout_counts_as_installed():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    optimizer.step()
    packages = {module_of(each).partition(".")[0] for each in installed(optimizer) if callable(each)}
    assert packages <= {"transformers"}  # which leaves a patch in nn.Module if an earlier test imports it


def once():
    return 1


def twice_and_once_aside():
    once()
    with without_profilers():
        once()
    once()


def test_cprofile_does_not_count_a_guarded_block():
    profile = cProfile.Profile(builtins=False)
    profile.runcall(twice_and_once_aside)
    counts = {name: calls for (_, _, name), (_, calls, *_) in pstats.Stats(profile).stats.items()}
    assert (counts["once"], counts["twice_and_once_aside"]) == (2, 1)
    assert not any("built-in" in name for name in counts)


@pytest.mark.parametrize("kind", ["profile", "trace"])
def test_profilers_and_tracers_do_not_see_a_guarded_block(kind):
    seen = []

    def note(frame, event, arg):
        if event == "call":
            seen.append(frame.f_code.co_name)

    change, get = getattr(sys, f"set{kind}"), getattr(sys, f"get{kind}")
    before = get()
    change(note)
    try:
        with Snapshot.capture([]).guarded():
            twice_and_once_aside()
        mine = get() is note
        once()
    finally:
        change(before)
    assert mine
    assert seen.count("once") == 1


class OwnSteps(torch.optim.SGD):
    """Optimizer whose step reaches torch's tables of hooks, as the user's code."""

    def step(self, closure=None):
        """Do nothing. SGD.step would call the hooks once more."""


def hooks_of_flatout():
    return [
        hook
        for table in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        for hook in table.values()
        if module_of(hook).startswith("flatout.")
    ]


def test_restoring_leaves_flatouts_own_step_hooks_alone():
    model = nn.Linear(2, 1)
    optimizer, checked = OwnSteps(model.parameters(), lr=0.1), []
    users = register_optimizer_step_post_hook(lambda *_: None)

    def steps():
        optimizer.step()
        return len(checked)

    before, outside = Snapshot.capture([model], optimizer), hooks_of_flatout()
    with before_steps(checked.append):
        inside, hooks = Snapshot.capture([model], optimizer), hooks_of_flatout()
        users.remove()
        before.restore()
        assert users.id in _global_optimizer_post_hooks
        assert hooks_of_flatout() == hooks
        assert steps() == 1
    inside.restore()
    assert hooks_of_flatout() == outside
    assert steps() == 1
    users.remove()

"""Averages of the weights: equal to torch's AveragedModel, saved, swapped in and out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flatout.optim as fo
from flatout.core.snapshot import Snapshot
from tests.optim.bounds import join
from tests.optim.helpers import parameters, set_grads
from tests.optim.rules import NAMES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_torchs_averaged_model(name, dtype):
    model = torch.nn.ParameterList(parameters(dtype))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)  # the first update copies
    optimizer = getattr(fo, name)(model, lr=1e-2, ema_decay=0.9)
    for step in range(5):
        set_grads(list(model), step)
        optimizer.step()
        averaged.update_parameters(model)
    ours = optimizer.ema.state_dict()["averages"]
    for i, expected in enumerate(averaged.module):
        assert ours[i].dtype == dtype
        torch.testing.assert_close(ours[i], expected.detach(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"master_weights": "float32"}, {"master_weights": "remainder"}], ids=str)
def test_averages_use_the_master_weights(options):
    params = parameters(torch.bfloat16, [(5, 7), (64,)])
    optimizer = fo.AdamW(params, lr=1e-3, ema_decay=0.8, **options)
    expected = [p.detach().double() for p in params]
    for step in range(4):
        set_grads(params, step)
        optimizer.step()
        for i, p in enumerate(params):
            state = optimizer.state[p]
            weight = state.get("master", p.detach())
            if "remainder" in state:
                weight = join(p.detach(), state["remainder"])
            if options:
                expected[i] += 0.2 * (weight.double() - expected[i])
    for i, p in enumerate(params):
        assert optimizer.state[p]["ema"].dtype == torch.float32
        if options:
            torch.testing.assert_close(optimizer.state[p]["ema"].double(), expected[i], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"master_weights": "remainder"}], ids=str)
def test_averages_that_begin_late_begin_at_the_weight(options):
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = fo.SGD([p], lr=1e-3, **options)
    for step in range(3):
        optimizer.param_groups[0].update({"ema_decay": 1.0} if step == 2 else {})
        weight = p.detach().float()
        if options and step:
            weight = join(p.detach(), optimizer.state[p]["remainder"])
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(optimizer.state[p]["ema"], weight)


@pytest.mark.parametrize("leave", ["return", "exception"])
def test_swap_restores_every_bit(leave):
    params = [*parameters(torch.float32), *parameters(torch.bfloat16), torch.nn.Parameter(torch.randn(4, 6)[:, ::2])]
    late = torch.nn.Parameter(torch.full((3,), 7.0))
    options = {"ema_decay": 0.5, "master_weights": "float32", "low_precision_copy": torch.bfloat16}
    optimizer = fo.AdamW([*params, late], lr=0.1, **options)
    optimizer.copy_of(params[0])
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    before = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    try:
        with optimizer.ema.swap():
            for p in params:
                assert torch.equal(p, optimizer.state[p]["ema"].to(p.dtype))
            assert (late == 7).all(), "never stepped: its own average"
            assert torch.equal(optimizer.state[params[0]]["copy"], params[0].bfloat16())
            set_grads(params, 3)
            with pytest.raises(RuntimeError, match=r"step.*swap"):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"swap|nested"), optimizer.ema.swap():
                pass
            if leave == "exception":
                raise KeyError
    except KeyError:
        pass
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert torch.equal(optimizer.state[params[0]]["copy"], params[0].bfloat16())
    for i, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[i][key]) for key, value in entry.items())
    masters = [optimizer.state[p]["master"].clone() for p in params if p.dtype == torch.bfloat16]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    for p, master in zip([p for p in params if p.dtype == torch.bfloat16], masters, strict=True):
        assert torch.equal(optimizer.state[p]["master"], master), "a swap does not touch masters"


def test_saving_and_loading():
    def make(decay=0.5):
        params = parameters(torch.bfloat16, [(5,), (6, 3)])
        return fo.SGD(params, lr=0.1, ema_decay=decay), params

    (one, theirs), (two, ours), (none, _) = make(), make(), make(None)
    for step in range(3):
        set_grads(theirs, step)
        one.step()
    saved = copy.deepcopy(one.ema.state_dict())
    assert saved.keys() == {"averages"}
    two.ema.load_state_dict(saved)
    saved["averages"][0].zero_()
    assert torch.equal(two.state[ours[0]]["ema"], one.state[theirs[0]]["ema"]), "loads a copy"
    with torch.no_grad():
        for p, q in zip(theirs, ours, strict=True):
            q.copy_(p)
    for optimizer, params in ((one, theirs), (two, ours)):
        set_grads(params, 5)
        optimizer.step()
    for p, q in zip(theirs, ours, strict=True):
        assert torch.equal(one.state[p]["ema"], two.state[q]["ema"])
    before = copy.deepcopy(two.ema.state_dict())
    for bad, message in (
        ({1: torch.zeros(2)}, r"averages\[1\].*\(6, 3\).*\(2,\)"),
        ({0: torch.zeros(5), 2: torch.zeros(1)}, r"averages\[2\].*ema_decay"),
    ):
        with pytest.raises(ValueError, match=message):
            two.ema.load_state_dict({"averages": bad})
    assert all(torch.equal(v, before["averages"][i]) for i, v in two.ema.state_dict()["averages"].items())
    with pytest.raises(ValueError, match=r"state_dict.*'averages'.*\['state'\]"):
        two.ema.load_state_dict({"state": {}})
    with pytest.raises(ValueError, match=r"averages\[0\]"):
        none.ema.load_state_dict(saved)


def test_averages_may_be_loaded_before_the_first_step():
    p, *_ = parameters(torch.float32, [(3,)])
    optimizer = fo.AdamW([p], ema_decay=0.5)
    optimizer.ema.load_state_dict({"averages": {0: torch.ones(3)}})
    copy.deepcopy(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[p]["ema"], torch.ones(3))
    p.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["ema"], (1 + p.detach()) / 2)


def test_copy_to():
    params = parameters(torch.bfloat16, [(5,), (6, 3)])
    optimizer = fo.SGD(params, lr=0.1, ema_decay=0.5)
    set_grads(params, 0)
    params[1].grad = None
    optimizer.step()
    targets = [torch.zeros(5), torch.zeros(6, 3)]
    optimizer.ema.copy_to(iter(targets))
    assert torch.equal(targets[0], optimizer.state[params[0]]["ema"])
    assert torch.equal(targets[1], params[1].float())
    with pytest.raises(ValueError, match=r"parameters.*\(2\).* 1"):
        optimizer.ema.copy_to(targets[:1])


def test_a_snapshot_holds_averages_masters_and_copies():
    params = [*parameters(torch.float32, [(5,)]), *parameters(torch.bfloat16, [(6, 3)])]
    options = {"ema_decay": 0.5, "master_weights": "float32", "low_precision_copy": torch.bfloat16}
    optimizer = fo.AdamW(params, **options)
    set_grads(params, 0)
    optimizer.step()
    snapshot = Snapshot.capture([], optimizer)
    results = []
    for _ in range(2):
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        results.append([t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())])
        snapshot.restore()
        assert torch.equal(optimizer.state[params[0]]["copy"], params[0].bfloat16())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_skipped_step_averages_nothing():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = fo.SGD([p], lr=1.0, ema_decay=0.5)
    for value in (1.0, float("inf")):
        p.grad = torch.full_like(p, value)
        fo.update(optimizer, inv_scale=torch.tensor(1.0))
        assert torch.equal(optimizer.state[p]["ema"], torch.full((4,), 0.5))

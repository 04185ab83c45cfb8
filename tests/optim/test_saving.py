"""``state_dict`` and ``load_state_dict``: torch's state bit for bit, and round trips of flatout's additions."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import flatout.optim as fo
from tests.optim.helpers import parameters, saved_state, set_grads
from tests.optim.rules import IN_TORCH, NAMES, RULES

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ADDITIONS = [
    {"master_weights": "float32"},
    {"master_weights": "float32", "moment_dtype": BF16},
    {"master_weights": "remainder", "ema_decay": 0.9},
    {"moment_dtype": F32, "stochastic_rounding": True, "seed": 3},
    {"ema_decay": 0.9, "low_precision_copy": BF16},
]


def make(name, dtypes=(BF16, F32), module=fo, **options):
    params = [p for dtype in dtypes for p in parameters(dtype, [(5,), (6, 3), (0,)])]
    return getattr(module, name)(params, lr=1e-2, **RULES[name].varied, **options), params


def stepped(optimizer, params, step):
    set_grads(params, step)
    optimizer.step()


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].keys() == b[key].keys()
        for name, value in a[key].items():
            assert torch.equal(value, b[key][name]), name
            assert (value.dtype, value.device) == (b[key][name].dtype, b[key][name].device), name


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("additions", ADDITIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_additions_round_trip_to_the_bit_and_go_on(name, additions):
    (one, theirs), (two, ours) = make(name, **additions), make(name, **additions)
    for step in range(3):
        stepped(one, theirs, step)
    saved = one.state_dict()
    assert not any("copy" in entry for entry in saved["state"].values())
    two.load_state_dict(through_a_file(saved))
    same(two.state_dict()["state"], saved["state"])
    assert two.param_groups[0].keys() == one.param_groups[0].keys()
    with torch.no_grad():
        for p, q in zip(theirs, ours, strict=True):
            q.copy_(p)
    for step in range(3, 6):
        stepped(one, theirs, step), stepped(two, ours, step)
    assert all(torch.equal(p, q) for p, q in zip(theirs, ours, strict=True))
    same(two.state_dict()["state"], one.state_dict()["state"])


@pytest.mark.parametrize("additions", ADDITIONS, ids=str)
@pytest.mark.parametrize("name", IN_TORCH)
def test_torchs_class_takes_what_it_knows(name, additions):
    (one, theirs), (two, ours) = make(name, **additions), make(name, module=torch.optim)
    for step in range(2):
        stepped(one, theirs, step)
    two.load_state_dict(one.state_dict())
    for p, q in zip(theirs, ours, strict=True):
        for key in RULES[name].states(RULES[name].varied):
            assert torch.equal(two.state[q][key], one.state[p][key].to(q.dtype))
    stepped(two, ours, 3)


@pytest.mark.parametrize("additions", ADDITIONS, ids=str)
@pytest.mark.parametrize("name", IN_TORCH)
def test_from_torch_into_additions(name, additions):
    """The loading optimizer keeps its options. State that torch lacks starts as at a first step."""
    (one, theirs), (two, ours) = make(name, module=torch.optim), make(name, **additions)
    fresh, own = make(name, **additions)
    stepped(fresh, own, 0)
    for step in range(2):
        stepped(one, theirs, step)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert additions.items() <= two.param_groups[0].items()
    for p, q, r in zip(theirs, ours, own, strict=True):
        for key in RULES[name].states(RULES[name].varied):
            dtype = fresh.state[r][key].dtype
            assert torch.equal(two.state[q][key], one.state[p][key].to(dtype))
            assert two.state[q][key].dtype == dtype
    before = [q.detach().float() for q in ours]
    two.param_groups[0]["lr"] = 0.0
    stepped(two, ours, 3)
    for q, b in zip(ours, before, strict=True):
        assert torch.equal(q.detach().float(), b)
        assert torch.equal(two.state[q].get("ema", b), b)
        assert torch.equal(two.state[q].get("master", b), b)


def test_the_saved_options_win():
    (one, theirs), (two, ours) = make("AdamW", (BF16,), master_weights="float32"), make("AdamW", (BF16,))
    stepped(one, theirs, 0)
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["master_weights"] == "float32"
    assert two.state[ours[0]]["master"].dtype == F32
    (three, others) = make("AdamW", (F32,))
    three.load_state_dict(one.state_dict())
    assert "master" not in three.state[others[0]], "float32 parameters have no masters"
    stepped(three, others, 1)


def test_hooks_see_and_decide_what_is_loaded():
    (one, theirs), (two, ours) = (make("AdamW", (BF16,), moment_dtype=F32) for _ in range(2))
    stepped(one, theirs, 0)
    seen = []

    def halve(_, saved):
        entries = {i: {**e, "exp_avg": e["exp_avg"] / 2} for i, e in saved["state"].items()}
        return {**saved, "state": entries}

    two.register_load_state_dict_pre_hook(halve)
    two.register_load_state_dict_post_hook(lambda o: seen.append(o.state[ours[0]]["exp_avg"].clone()))
    two.load_state_dict(one.state_dict())
    assert torch.equal(seen[0], one.state[theirs[0]]["exp_avg"] / 2)
    assert torch.equal(two.state[ours[0]]["exp_avg"], seen[0])
    assert len(two._optimizer_load_state_dict_pre_hooks) == len(two._optimizer_load_state_dict_post_hooks) == 1


def test_hooks_see_and_decide_what_is_saved():
    optimizer, params = make("SGD", (F32,), low_precision_copy=BF16)
    stepped(optimizer, params, 0)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(saved["state"][0].keys()))
    optimizer.register_state_dict_post_hook(lambda _, saved: {f"state.{i}": e for i, e in saved["state"].items()})
    assert optimizer.state_dict().keys() == {"state.0", "state.1", "state.2"}
    assert seen == [{"momentum_buffer"}]
    assert len(optimizer._optimizer_state_dict_post_hooks) == 2


def test_lion_takes_groups_without_its_flags():
    (saver, saved_params), (loader, params) = make("Lion", (F32,)), make("Lion", (F32,))
    for each in (saver, saved_params), (loader, params):
        stepped(*each, 0)
    saved = saver.state_dict()
    for flag in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        del saved["param_groups"][0][flag]
    loader.load_state_dict(saved)
    assert loader.param_groups[0]["maximize"] is False
    for each in (saver, saved_params), (loader, params):
        stepped(*each, 1)
    assert all(torch.equal(p, q) for p, q in zip(saved_params, params, strict=True))


def test_a_load_that_fails_changes_nothing():
    (one, theirs), (two, _) = make("AdamW"), make("AdamW", (BF16,))
    stepped(one, theirs, 0)
    before = copy.deepcopy(one.state_dict()["state"])
    with pytest.raises(ValueError, match="doesn't match the size"):
        one.load_state_dict(two.state_dict())
    same(one.state_dict()["state"], before)
    (half, hers), (differentiable, _) = (
        make("AdamW", (F16,), master_weights="float32"),
        make("AdamW", module=torch.optim),
    )
    stepped(half, hers, 0)
    (remainder, _) = make("AdamW", (BF16,), master_weights="remainder")
    groups = copy.deepcopy([{**group, "params": []} for group in half.param_groups])
    with pytest.raises(ValueError, match=r"'remainder'.* torch\.float16"):
        half.load_state_dict(remainder.state_dict())
    assert [{**group, "params": []} for group in half.param_groups] == groups
    stepped(half, hers, 1)
    differentiable.param_groups[0]["differentiable"] = True
    with pytest.raises(ValueError, match="differentiable"):
        one.load_state_dict(differentiable.state_dict())
    assert not one._optimizer_load_state_dict_pre_hooks
    stepped(one, theirs, 1)


@pytest.mark.parametrize("flags", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_step_counts_lie_where_torch_has_them(flags):
    """The fake tensor represents a count on a device other than the CPU."""
    optimizer, params = make("Adam", (F32,), **flags)
    stepped(optimizer, params, 0)
    optimizer.state[params[0]]["step"] = _Elsewhere()
    saved = saved_state(optimizer, params[0])
    assert saved["step"] == ("elsewhere" if flags else "cpu")
    assert optimizer.state[params[0]].keys() == saved.keys()


class _Elsewhere:
    def __eq__(self, other):
        return other == "elsewhere"

    def cpu(self):
        return "cpu"


def test_counts_in_double_precision_are_taken():
    """torch counts in its default dtype."""
    params = parameters(F32, [(4,)])
    theirs = torch.optim.Adam(params)
    stepped(theirs, params, 0)
    theirs.state[params[0]]["step"] = theirs.state[params[0]]["step"].double()
    optimizer = fo.fuse(theirs)
    stepped(optimizer, params, 1)
    assert optimizer.state[params[0]]["step"] == 2


def test_sgd_shows_its_count_only_where_it_must():
    shown = [{"stochastic_rounding": True}]
    for additions in ({}, {"master_weights": "float32"}, *shown):
        optimizer, params = make("SGD", (BF16,), **additions)
        stepped(optimizer, params, 0)
        saved = optimizer.state_dict()["state"][0]
        assert ("step" in saved) == (additions in shown)
        assert optimizer.state[params[0]]["step"] == 1


def test_a_users_own_entries_of_a_group_stay_what_they_are():
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "mine": torch.bfloat16}]
    ours, theirs = fo.AdamW(groups), torch.optim.AdamW([dict(groups[0])])
    assert ours.state_dict() == theirs.state_dict()
    ours.load_state_dict(ours.state_dict())
    assert ours.param_groups[0]["mine"] is torch.bfloat16

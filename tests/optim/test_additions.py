"""Options that torch's classes lack: masters, remainders, moments of other dtypes, random rounding, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import flatout.optim as fo
from tests.optim.bounds import away_from_zero, join
from tests.optim.helpers import assert_same, parameters, set_grads, state_of
from tests.optim.rules import IN_TORCH, NAMES, RULES

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MOMENTS = {name: rule.states(rule.options) for name, rule in RULES.items()}


def make(name, params, **options):
    return getattr(fo, name)(params, **{"lr": 1e-3, **RULES[name].options, **options})


def in_single_precision(params):
    """Return float32 copies of 16-bit parameters. Masters must equal a run with these copies and the same gradients."""
    return [torch.nn.Parameter(p.detach().float()) for p in params]


def step_both(wide, ours, theirs, low, step):
    set_grads(low, step)
    for p, q in zip(wide, low, strict=True):
        p.grad = q.grad.float()
    theirs.step(), ours.step()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_masters_are_a_run_in_single_precision(name, dtype):
    low = parameters(dtype)
    wide = in_single_precision(low)
    ours, theirs = make(name, low, master_weights="float32"), make(name, wide)
    for step in range(5):
        step_both(wide, ours, theirs, low, step)
    for p, q in zip(wide, low, strict=True):
        assert torch.equal(ours.state[q]["master"], p)
        assert torch.equal(q, p.to(dtype))
        for key in MOMENTS[name]:
            assert ours.state[q][key].dtype == F32
            assert torch.equal(ours.state[q][key], theirs.state[p][key])


@pytest.mark.parametrize("name", NAMES)
def test_remainders_are_the_same_run(name):
    """Only the parameter may differ, by one unit in the last place, if the weight lies halfway."""
    low = parameters(BF16)
    wide = in_single_precision(low)
    ours, theirs = make(name, low, master_weights="remainder"), make(name, wide)
    for step in range(5):
        step_both(wide, ours, theirs, low, step)
    for p, q in zip(wide, low, strict=True):
        remainder = ours.state[q]["remainder"]
        assert remainder.dtype == torch.int16
        assert torch.equal(join(q.detach(), remainder), p)
        assert torch.equal(q.detach(), away_from_zero(p.detach()))


def test_small_updates_are_not_lost():
    for options, moves in (({}, False), ({"master_weights": "float32"}, True), ({"master_weights": "remainder"}, True)):
        p = torch.nn.Parameter(torch.ones(4, dtype=BF16))
        optimizer = fo.SGD([p], lr=1e-3, **options)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert (p[0] != 1) == moves, options


@pytest.mark.parametrize(
    ("dtype", "moments"), [(F32, BF16), (F32, F16), (BF16, F32), (F16, F32), (BF16, BF16)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_moments_of_another_dtype(name, dtype, moments):
    params = parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().double()) for p in params]
    optimizer = make(name, params, moment_dtype=moments, lr=1e-2)
    exact = RULES[name].torch_class(wide, lr=1e-2, **RULES[name].options)
    set_grads(params, 0)
    for p, q in zip(wide, params, strict=True):
        p.grad = q.grad.double()
    optimizer.step(), exact.step()
    for key in MOMENTS[name]:
        assert all(t.dtype == moments for t in state_of(optimizer, key))
        assert_same([t.to(moments) for t in state_of(exact, key)], state_of(optimizer, key), moments)
    assert_same([p.to(dtype) for p in wide], params, dtype)


@pytest.mark.parametrize(
    "options", [{"master_weights": "float32"}, {"moment_dtype": BF16}, {"ema_decay": 0.5}], ids=str
)
def test_float64_and_complex_parameters_have_no_low_precision_state(options):
    params = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float64, torch.complex64)]
    optimizer, plain = fo.Adam(params, **options), fo.Adam(copy.deepcopy(params))
    for o in (optimizer, plain):
        for p in o.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 2.0)
        o.step()
    assert_same(plain.param_groups[0]["params"], params, torch.float64)
    for p in params:
        assert optimizer.state[p]["exp_avg"].dtype == p.dtype
        assert optimizer.state[p].keys() - {"ema"} == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[p].get("ema", p).dtype == p.dtype


def test_groups_may_differ():
    params = parameters(BF16, [(5,), (6,), (7,)])
    optimizer = fo.AdamW(
        [
            {"params": params[:1]},
            {"params": params[1:2], "master_weights": None},
            {"params": params[2:], "master_weights": "remainder", "moment_dtype": BF16},
        ],
        master_weights="float32",
    )
    set_grads(params, 0)
    optimizer.step()
    extra = [sorted(optimizer.state[p].keys() - {"step", "exp_avg", "exp_avg_sq"}) for p in params]
    assert extra == [["master"], [], ["remainder"]]
    assert [optimizer.state[p]["exp_avg"].dtype for p in params] == [F32, BF16, BF16]
    assert "master_weights" not in optimizer.param_groups[1]


def test_without_additions_groups_are_torchs():
    for name in IN_TORCH:
        p = torch.nn.Parameter(torch.ones(1))
        ours = getattr(fo, name)([p], stochastic_rounding=False, seed=0, ema_decay=None)
        theirs = getattr(torch.optim, name)([p])
        assert ours.param_groups == theirs.param_groups
        assert ours.defaults == theirs.defaults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master_weights": "float16"}, "master_weights.* 'float16'"),
        ({"master_weights": True}, "master_weights.* True"),
        ({"moment_dtype": torch.float64}, "moment_dtype.* torch.float64"),
        ({"moment_dtype": torch.int8}, "moment_dtype.* torch.int8"),
        ({"low_precision_copy": F32}, "low_precision_copy.* torch.float32"),
        ({"stochastic_rounding": "yes"}, "stochastic_rounding.* 'yes'"),
        ({"ema_decay": 1.5}, "ema_decay.* 1.5"),
        ({"ema_decay": float("nan")}, "ema_decay.* nan"),
        ({"seed": -1}, "seed.* -1"),
        ({"seed": 0.5}, "seed.* 0.5"),
        ({"moment_dtype": F16}, "bfloat16.*float16|float16.*bfloat16"),
        ({"master_weights": "float32", "moment_dtype": F16}, "bfloat16.*float16|float16.*bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_invalid_options_of_an_added_group_are_refused(name, options, message):
    p, q = parameters(BF16, [(3,), (4,)])
    with pytest.raises(ValueError, match=message):
        getattr(fo, name)([p], **options)
    optimizer = getattr(fo, name)([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [q], **options})
    assert len(optimizer.param_groups) == 1
    if name in IN_TORCH:
        theirs = getattr(torch.optim, name)([p])
        with pytest.raises(ValueError, match=message):
            fo.fuse(theirs, **options)
        assert type(theirs) is getattr(torch.optim, name)
        assert "seed" not in theirs.defaults


@pytest.mark.parametrize(
    "case",
    [
        (F16, {"master_weights": "remainder"}, "'remainder'.* torch.float16"),
        (F32, {"moment_dtype": BF16, "low_precision_copy": F16}, "bfloat16.*float16|float16.*bfloat16"),
    ],
    ids=lambda c: str(c[1]),
)
def test_options_invalid_for_a_dtype_are_refused(case):
    dtype, options, message = case
    with pytest.raises(ValueError, match=message):
        fo.AdamW(parameters(dtype, [(3,)]), **options)


def test_options_may_change_between_steps():
    p = torch.nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = fo.AdamW([p], lr=1e-2)
    group, state = optimizer.param_groups[0], optimizer.state[p]
    for options in ({}, {"moment_dtype": F32}, {"master_weights": "float32"}, {"ema_decay": 0.9}, {"ema_decay": 0.99}):
        group.update(options)
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert state["exp_avg"].dtype == F32
    assert state["step"] == 5
    assert torch.equal(state["master"].to(BF16), p)
    torch.testing.assert_close(state["exp_avg"], torch.full((8,), 1 - 0.9**5), rtol=1e-2, atol=0)


def test_a_parameter_written_by_others_refreshes_its_master():
    p = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = fo.SGD([p], lr=1e-3, master_weights="float32")
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    master = optimizer.state[p]["master"]
    kept = master.clone()
    with torch.no_grad():
        p.copy_(p.clone())  # equal values: no loss
        p[1:2] = 5.0
    p.grad = torch.ones_like(p)
    optimizer.step()
    expected = kept - 1e-3
    expected[1] = 5.0 - 1e-3
    torch.testing.assert_close(optimizer.state[p]["master"], expected, rtol=0, atol=1e-7)
    assert optimizer.state[p]["master"] is master


def test_a_model_and_its_optimizer_may_be_loaded_in_any_order():
    for order in ("model first", "optimizer first"):
        for kind in ("float32", "remainder"):
            torch.manual_seed(0)
            models = [torch.nn.Linear(7, 5).bfloat16() for _ in range(2)]
            optimizers = [fo.AdamW(m.parameters(), master_weights=kind) for m in models]
            for step in range(3):
                set_grads(list(models[0].parameters()), step)
                optimizers[0].step()
            loads = [(models[1], models[0].state_dict()), (optimizers[1], optimizers[0].state_dict())]
            for target, saved in loads if order == "model first" else loads[::-1]:
                target.load_state_dict(copy.deepcopy(saved))
            for model, optimizer in zip(models, optimizers, strict=True):
                set_grads(list(model.parameters()), 9)
                optimizer.step()
            for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
                assert torch.equal(p, q)
                for key, value in optimizers[0].state[p].items():
                    assert torch.equal(value, optimizers[1].state[q][key]), (order, kind, key)


def test_masters_of_views_and_of_shared_memory():
    base = torch.randn(6, 8).bfloat16()
    p = torch.nn.Parameter(base[:, ::2])
    wide = torch.nn.Parameter(p.detach().float())
    optimizer, exact = fo.AdamW([p], master_weights="float32"), fo.AdamW([wide])
    for step in range(3):
        set_grads([p], step)
        wide.grad = p.grad.float()
        optimizer.step(), exact.step()
    assert torch.equal(p, wide.bfloat16())
    assert torch.equal(optimizer.state[p]["master"], wide)

    both = [torch.nn.Parameter(t) for t in (base, base.view(48))]
    before = base.clone()
    for kind in ("float32", "remainder"):
        other = torch.nn.Parameter(torch.ones(3))
        optimizer = fo.AdamW([{"params": [other]}, {"params": both, "master_weights": kind}])
        set_grads([other, *both], 0)
        with pytest.raises(ValueError, match=r"\b1 and 2\b.*master_weights"):
            optimizer.step()
        assert torch.equal(base, before)
        assert not optimizer.state, "refused before any state is begun"


def test_copies_are_written_by_the_step():
    params = [*parameters(F32), torch.nn.Parameter(torch.randn(6, 8)[:, ::2])]
    optimizer = fo.AdamW(params, low_precision_copy=BF16)
    copies = [optimizer.copy_of(p) for p in params]
    assert not optimizer.state[params[0]].keys() - {"copy"}
    for step in range(3):
        for p, c in zip(params, copies, strict=True):
            assert optimizer.copy_of(p) is c
            assert not c.requires_grad
            assert torch.equal(c, p.to(BF16))
        set_grads(params, step)
        optimizer.step()
        for p, c in zip(params, copies, strict=True):
            assert torch.equal(c, p.to(BF16))
        optimizer.load_state_dict(optimizer.state_dict())
    assert all("copy" not in entry for entry in optimizer.state_dict()["state"].values())


def test_a_write_over_a_copy_is_seen_by_autograd():
    p, q = parameters(F32, [(3,), (4,)])
    optimizer = fo.SGD([p, q], low_precision_copy=BF16)
    copies = [optimizer.copy_of(p), optimizer.copy_of(q)]
    set_grads([p, q], 0)
    optimizer.step()
    before = [c._version for c in copies]
    q.grad = None
    optimizer.step()
    assert [c._version for c in copies] == [before[0] + 1, before[1]]


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_may_be_there_before_the_first_step(name, clone):
    p, frozen = parameters(F32, [(3,), (4,)])
    for first in (True, False):
        optimizer = getattr(fo, name)([frozen, p], low_precision_copy=BF16)
        optimizer.copy_of(frozen)
        p.grad = torch.ones_like(p)
        if not first:
            optimizer.step()
        assert list(optimizer.state_dict()["state"]) == ([] if first else [1])
        optimizer.load_state_dict(optimizer.state_dict())
        clone(optimizer)
        optimizer.step()


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("sign", [1, -1])
def test_writing_over_a_weight_with_a_remainder_gives_no_nan(value, sign):
    p = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = fo.SGD([p], lr=2.0**-12, maximize=sign < 0, master_weights="remainder")
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (optimizer.state[p]["remainder"].sign() == -sign).all()
    with torch.no_grad():
        p.fill_(value)
    expected = join(p.detach(), optimizer.state[p]["remainder"])
    assert not expected.isnan().any()
    optimizer.param_groups[0].update(lr=0.0, ema_decay=0.5)
    optimizer.step()  # initializes the average with the weight
    assert torch.equal(p.detach(), torch.full_like(p, value))
    if value == 0:
        assert torch.equal(optimizer.state[p]["ema"], expected)


def test_masters_of_other_options_are_not_kept():
    p = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = fo.SGD([p], lr=2.0**-12, master_weights="remainder")
    p.grad = torch.ones_like(p)
    group, state = optimizer.param_groups[0], optimizer.state
    optimizer.step()
    group.update(lr=0.0, master_weights="float32")
    optimizer.step()
    assert state[p].keys() == {"master"}
    assert torch.equal(state[p]["master"], torch.full((4,), 1 - 2.0**-12)), "begins with the weight, not the parameter"
    group.update(lr=1.0, master_weights=None)
    optimizer.step()
    assert not state[p]
    group.update(lr=0.0, ema_decay=0.5)
    optimizer.step()
    assert torch.equal(state[p]["ema"], p.detach().float())


def test_none_turns_an_option_off_at_run_time():
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = fo.SGD([p], lr=1.0, ema_decay=0.5, stochastic_rounding=True, seed=1)
    for options in ({}, {"ema_decay": None, "seed": None}):
        optimizer.param_groups[0].update(options)
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), -2.0))
    optimizer.param_groups[0]["stochastic_rounding"] = False
    p.grad = p.grad.to_sparse()
    optimizer.step()  # torch's class, which refuses additional options


def test_copy_of_a_parameter_without_a_copy_is_refused():
    p, half, stranger = (torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (F32, BF16, F32))
    optimizer = fo.SGD([{"params": [p], "low_precision_copy": None}, {"params": [half]}], low_precision_copy=BF16)
    for parameter in (p, half, stranger):
        with pytest.raises(ValueError, match=r"float32.*low_precision_copy"):
            optimizer.copy_of(parameter)


def random_run(seed, threads, steps=8, resume=None, name="AdamW", **options):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        params = parameters(BF16, [(70_001,), (3, 7), (9,)])
        optimizer = make(name, params, stochastic_rounding=True, seed=seed, **options)
        for step in range(steps):
            if step == resume:
                saved = copy.deepcopy(optimizer.state_dict())
                params = [torch.nn.Parameter(p.detach().clone()) for p in params]
                optimizer = make(name, params, stochastic_rounding=True, seed=seed, **options)
                optimizer.load_state_dict(saved)
            set_grads(params, step)
            if step == 2:
                params[1].grad = None
            optimizer.step()
        return [t.detach().clone() for p in params for t in (p, *optimizer.state[p].values())]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("options", [{}, {"master_weights": "remainder", "moment_dtype": BF16}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_random_rounding_is_reproducible_and_resumable(name, options):
    run = random_run(1, 1, name=name, **options)
    same = lambda other: all(torch.equal(a, b) for a, b in zip(run, other, strict=True))  # noqa: E731
    assert same(random_run(1, 2, name=name, **options))
    assert same(random_run(1, 2, name=name, resume=4, **options))
    assert not same(random_run(2, 2, name=name, **options))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_random_rounding_has_no_bias(name):
    n = 200_000
    p = torch.nn.Parameter(torch.ones(n, dtype=BF16))
    # Each step is a thousandth of a unit in the last place (2^-7). Rounding to nearest would lose these steps.
    optimizer = make(name, [p], lr=2.0**-7 / 1000, stochastic_rounding=True, **({"weight_decay": 0.0}))
    for _ in range(100):
        p.grad = torch.full_like(p, -1.0)
        optimizer.step()
    # Sum of the momentum: sum of (1 - 0.9^k) / 0.1 for SGD. Adam moves by lr in each step.
    moved = sum((1 - 0.9**k) / 0.1 for k in range(1, 101)) / 1000 if name == "SGD" else 0.1
    ulps = (p.detach().double() - 1) * 128
    # Five standard errors of the mean of n sums of Bernoulli variables.
    assert abs(ulps.mean().item() - moved) < 5 * (moved / n) ** 0.5 + 2e-3 * moved
    assert ulps.unique().numel() > 1


def test_random_bits_differ_between_parameters_and_steps():
    params = [torch.nn.Parameter(torch.ones(4096, dtype=BF16)) for _ in range(2)]
    optimizer = fo.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=2.0**-8, stochastic_rounding=True)
    seen = []
    for _ in range(2):
        for p in params:
            with torch.no_grad():
                p.fill_(1)
            p.grad = torch.full_like(p, -1.0)
        optimizer.step()
        seen += [p.detach().clone() for p in params]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert 0.4 < (a == b).float().mean() < 0.6


def test_fuse_and_unfuse_with_additions():
    params = parameters(BF16, [(5,), (6, 3)])
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    keys = optimizer.param_groups[0].keys()
    set_grads(params, 0)
    optimizer.step()
    fo.fuse(optimizer, master_weights="float32", ema_decay=0.9)
    for clone in (optimizer, copy.deepcopy(optimizer)):
        own = clone.param_groups[0]["params"]
        set_grads(own, 1)
        clone.step()
        assert clone.state[own[0]].keys() == {"step", "exp_avg", "exp_avg_sq", "master", "ema"}
        clone.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert clone.param_groups[1]["ema_decay"] == 0.9
        assert type(fo.unfuse(clone)) is torch.optim.AdamW
        assert clone.state[own[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert clone.state[own[0]]["exp_avg"].dtype == BF16
        assert [group.keys() for group in clone.param_groups] == [keys, keys]
        assert clone.defaults.keys() == keys - {"params"}
        clone.step()
    native = fo.AdamW(params)
    fo.fuse(native, ema_decay=0.9)
    native.step()
    assert native.param_groups[0]["ema_decay"] == 0.9, "one that is native already gets them too"
    assert "ema" in native.state[params[0]]
    with pytest.raises(TypeError, match=r"master_weight\b.*master_weights"):
        fo.fuse(optimizer, master_weight="float32")

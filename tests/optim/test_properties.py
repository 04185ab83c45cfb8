"""Any mix of dtypes, shapes, layouts, scales, clips, skips and options, compared with the float64 reference."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flatout.optim as fo
from tests.optim.bounds import away_from_zero
from tests.optim.cases import BRAIN, DOUBLE, FLOAT, HALF, Run, bits, cases, weight_of


@settings(max_examples=150)
@given(cases())
def test_every_step_equals_the_reference(case):
    Run(case, checked=True)


@settings(max_examples=12)
@given(cases())
def test_the_same_twice_and_on_any_number_of_threads(case):
    threads = torch.get_num_threads()
    results = []
    case = replace(case, tensors=(*case.tensors, ((70_001,), case.tensors[0][1], "contiguous")))
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(Run(case).result)
    finally:
        torch.set_num_threads(threads)
    assert all(result == results[0] for result in results[1:])


@settings(max_examples=40)
@given(cases(), st.integers(0, 3))
def test_a_state_dict_in_the_middle_changes_nothing(case, at):
    assert Run(case, reload_after=min(at, len(case.steps) - 1)).result == Run(case).result


@settings(max_examples=30)
@given(cases())
def test_a_history_with_skipped_steps_is_one_without_them(case):
    assume(any(math.prod(shape) for shape, _, _ in case.tensors))  # an infinity needs an element
    assume(not all(step.skipped for step in case.steps))  # otherwise only one of the two has state
    with_skipped, without = Run(case), Run(case, without_skipped=True)
    for p, q in zip(with_skipped.params, without.params, strict=True):
        assert torch.equal(p, q)
    ours, theirs = with_skipped.optimizer.state_dict()["state"], without.optimizer.state_dict()["state"]
    for i, state in theirs.items():
        for key, value in state.items():
            assert value is None or torch.equal(ours[i][key], value)


# ---- cases that hypothesis does not draw -------------------------------------------------------------------


def test_parameters_side_by_side_in_one_storage():
    """Views of one flat buffer are common (DDP, FSDP), and do not overlap."""
    flat = torch.ones(30)
    params = [torch.nn.Parameter(flat[10 * i : 10 * (i + 1)]) for i in range(3)]
    for p in params:
        p.grad = torch.ones(10)
    fo.SGD(params, lr=0.5).step()
    assert torch.equal(flat, torch.full((30,), 0.5))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_that_overlap_are_stepped_one_after_the_other(name):
    """The second parameter reads the values that the first has written, as in torch's loop."""
    results = []
    for module, options in ((torch.optim, {"foreach": False}), (fo, {})):
        flat = torch.linspace(-1, 1, 30)
        params = [torch.nn.Parameter(flat[:20]), torch.nn.Parameter(flat[10:]), torch.nn.Parameter(flat)]
        optimizer = getattr(module, name)(params, lr=0.5, weight_decay=0.1, **options)
        for _ in range(3):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, i + 1.0)
            optimizer.step()
        results.append(flat)
    torch.testing.assert_close(results[1], results[0], rtol=2e-6, atol=1e-7)


def test_a_parameter_that_overlaps_itself_is_refused():
    base = torch.ones(4)
    p = torch.nn.Parameter(base.expand(3, 4))
    p.grad = torch.ones(3, 4)
    with pytest.raises(ValueError, match="parameter 0"):
        fo.SGD([p], lr=0.5).step()
    assert torch.equal(base, torch.ones(4)), "before anything is changed"


def test_a_remainder_is_for_bfloat16():
    with pytest.raises(ValueError, match=r"remainder.*bfloat16.*float16"):
        fo.AdamW([torch.nn.Parameter(torch.ones(3, dtype=HALF))], master_weights="remainder")
    for dtype in (FLOAT, DOUBLE):  # these dtypes need no master
        p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        p.grad = torch.ones_like(p)
        optimizer = fo.AdamW([p], master_weights="remainder")
        optimizer.step()
        assert optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_one_16_bit_dtype_per_bucket():
    """A new group with two 16-bit dtypes is refused with both names, and the optimizer is unchanged."""
    half, single = torch.nn.Parameter(torch.ones(3, dtype=HALF)), torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"bfloat16.*float16|float16.*bfloat16"):
        fo.AdamW([half], moment_dtype=BRAIN)
    optimizer = fo.AdamW([single])
    with pytest.raises(ValueError, match=r"bfloat16.*float16|float16.*bfloat16"):
        optimizer.add_param_group({"params": [half], "moment_dtype": BRAIN})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("master_weights", "float16"),
        ("moment_dtype", DOUBLE),
        ("moment_dtype", torch.int8),
        ("ema_decay", 1.5),
        ("ema_decay", -0.1),
        ("low_precision_copy", FLOAT),
        ("seed", -1),
    ],
)
def test_senseless_additions_are_named(option, value):
    extra = {"stochastic_rounding": True} if option == "seed" else {}
    with pytest.raises((ValueError, TypeError), match=option):
        fo.AdamW([torch.nn.Parameter(torch.ones(3))], **{option: value}, **extra)


def test_additions_are_keys_of_groups_only_where_they_are_set():
    p, q = (torch.nn.Parameter(torch.ones(3, dtype=BRAIN)) for _ in range(2))
    optimizer = fo.AdamW([p])
    expected = torch.optim.AdamW([p])
    assert optimizer.param_groups == expected.param_groups
    assert optimizer.defaults == expected.defaults
    optimizer.add_param_group({"params": [q], "master_weights": "float32"})
    for x in (p, q):
        x.grad = torch.ones_like(x)
    optimizer.step()
    assert "master" not in optimizer.state[p]
    assert optimizer.state[q]["master"].dtype == FLOAT


def stochastic(seed: int, n: int = 100_000) -> tuple[torch.Tensor, Any]:
    p = torch.nn.Parameter(torch.ones(n, dtype=BRAIN))
    optimizer = fo.SGD([p], lr=1.0, stochastic_rounding=True, seed=seed)
    p.grad = torch.full_like(p, -(2.0**-9))  # a quarter of the unit above 1, 2**-7
    optimizer.step()
    return p.detach(), optimizer


def test_stochastic_rounding_is_unbiased():
    """A quarter of a unit rounds up in a quarter of the elements. Rounding to nearest would lose all of it."""
    p, optimizer = stochastic(seed=1)
    up = (p == 1 + 2.0**-7).double()
    assert ((p == 1) | (up == 1)).all()
    assert abs(up.mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / p.numel())
    # Neighbors, the eight values of one draw, and places 64 apart must be independent.
    for distance in (1, 2, 4, 8, 64, 16_384):
        together = (up[distance:] * up[:-distance]).mean().item()
        assert abs(together - 0.0625) < 6 * math.sqrt(0.0625 / p.numel())
    optimizer.step()
    mean = (p.double() - 1).mean().item()
    assert mean == pytest.approx(2 * 2.0**-9, rel=0.05), "other bits in the second step"


def test_stochastic_rounding_is_keyed_by_its_seed():
    first, again, other = (stochastic(seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    agreement = (first == other).double().mean().item()
    assert agreement == pytest.approx(0.25**2 + 0.75**2, abs=0.01), "as two independent draws agree"


def test_tensors_of_one_optimizer_draw_different_bits():
    params = [torch.nn.Parameter(torch.ones(50_000, dtype=BRAIN)) for _ in range(2)]
    for p in params:
        p.grad = torch.full_like(p, -(2.0**-9))
    fo.SGD(params, lr=1.0, stochastic_rounding=True).step()
    assert (params[0] == params[1]).double().mean().item() == pytest.approx(0.625, abs=0.02)


def test_random_rounding_of_a_parameter_is_independent_of_other_gradients():
    """The random bits depend on the tensor, but not on its position among the gradients of a step."""
    results = []
    for alone in (True, False):
        params = [torch.nn.Parameter(torch.ones(5000, dtype=BRAIN)) for _ in range(2)]
        for p in params[1:] if alone else params:
            p.grad = torch.full_like(p, -(2.0**-9))
        fo.SGD(params, lr=1.0, stochastic_rounding=True, seed=3).step()
        results.append(params[1].detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_a_parameter_that_someone_wrote_refreshes_its_master(masters):
    """``model.load_state_dict`` writes parameters. An update from the old master would undo the write."""
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=BRAIN))
    optimizer = fo.SGD([p], lr=2.0**-12, master_weights=masters)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert weight_of(optimizer, p)[1].item() == 2 - 2.0**-12
    written = torch.tensor([5.0, 2.0, -7.0], dtype=BRAIN)
    with torch.no_grad():
        p.copy_(written)  # the second value is unchanged, so its low bits stay
    optimizer.step()
    expected = written.float() - torch.tensor([1, 2, 1]) * 2.0**-12
    if masters == "float32":
        assert torch.equal(weight_of(optimizer, p), expected)
    else:  # a remainder cannot detect the write, but the weight rounds to the written value
        assert torch.equal(away_from_zero(weight_of(optimizer, p) + 2.0**-12), written)
        assert weight_of(optimizer, p)[1] == expected[1]


@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_small_updates_add_up_in_masters(masters):
    """1,000 steps of 1e-4 move a bfloat16 weight of 1 by 0.1. Without masters the weight stays 1."""
    p = torch.nn.Parameter(torch.ones(64, dtype=BRAIN))
    optimizer = fo.SGD([p], lr=1e-4, master_weights=masters)
    p.grad = torch.ones_like(p)
    for _ in range(1000):
        optimizer.step()
    torch.testing.assert_close(weight_of(optimizer, p), torch.full((64,), 0.9), rtol=2e-5, atol=0)
    assert torch.equal(p, torch.full_like(p, 0.9))


@pytest.mark.parametrize("masters", [None, "float32", "remainder"])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_swapped_averages_come_back_bit_exactly(dtype, masters):
    """Parameters hold the averages inside ``swap()``, and the trained values after it, even after an exception."""
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (5, 0, 70)]
    twins = copy.deepcopy(params)
    optimizers = [fo.AdamW(x, ema_decay=0.5, master_weights=masters) for x in (params, twins)]
    for step in range(3):
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)).to(dtype)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        with suppress(KeyError), optimizers[0].ema.swap():
            for p in params:
                assert torch.equal(p, optimizers[0].state[p]["ema"].to(dtype))
            raise KeyError
        assert bits(optimizers[0], params) == bits(optimizers[1], twins)


def test_averages_have_a_state_dict_of_their_own():
    p = torch.nn.Parameter(torch.randn(9))
    optimizer = fo.SGD([p], lr=0.1, ema_decay=0.5)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    average = optimizer.state[p]["ema"].clone()
    q, copied = torch.nn.Parameter(p.detach().clone()), torch.zeros(9)
    other = fo.SGD([q], lr=0.1, ema_decay=0.5)
    other.ema.load_state_dict(copy.deepcopy(optimizer.ema.state_dict()))
    assert torch.equal(other.state[q]["ema"], average)
    optimizer.ema.copy_to([copied])
    assert torch.equal(copied, average)

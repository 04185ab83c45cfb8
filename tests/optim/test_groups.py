"""Param groups: groups that differ in numbers only share a bucket, and each group has its own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flatout.optim as fo
from tests.optim.harness import Calls, only_native
from tests.optim.helpers import assert_same, parameters, saved_state, set_grads
from tests.optim.rules import NAMES, RULES

SHAPES = [(3,), (0,), (5, 7), (4096,), (2, 3), (16385,)]
NUMBERS = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.003, "weight_decay": 0.1}, {"lr": 0.05, "weight_decay": 0.3}]
ADDITIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "average": (torch.float32, {"ema_decay": 0.9}),
    "copy": (torch.float32, {"low_precision_copy": torch.bfloat16}),
    "codes": (torch.float32, {"moment_dtype": torch.uint8}),
    "masters": (torch.float16, {"master_weights": "float32"}),
    "remainder": (torch.bfloat16, {"master_weights": "remainder", "moment_dtype": torch.uint8}),
    "random": (torch.bfloat16, {"stochastic_rounding": True, "seed": 3}),
}


@pytest.fixture(autouse=True)
def _native():
    with only_native():
        yield


def split(params, numbers=NUMBERS):
    """Return a param group for each entry of ``numbers``. Groups have equal numbers of parameters."""
    each = len(params) // len(numbers)
    return [{"params": params[i * each :][:each], **group} for i, group in enumerate(numbers)]


def train(make, params, change=lambda groups, step: None, steps=4):
    """Step an optimizer of ``params``. ``change`` may change its groups before each step."""
    optimizer = make(params)
    for step in range(steps):
        set_grads(params, step)
        change(optimizer.param_groups, step)
        optimizer.step()
    return optimizer


def assert_equal_bits(numbers, cls, dtype=torch.float32, shapes=SHAPES, change=lambda groups, step: None, **options):
    """Check that groups are updated as by an optimizer that has all parameters in one group with these numbers.

    Args:
        numbers: ``lr`` and ``weight_decay`` of each group.
        cls: the optimizer's class.
        dtype: dtype of the parameters.
        shapes: shapes of the parameters.
        change: see :func:`train`. It must treat all groups alike.
        options: options of the optimizer.

    Returns:
        The calls of native operators by the optimizer with groups.
    """
    ours = parameters(dtype, shapes)
    with Calls() as calls:
        optimizer = train(lambda params: cls(split(params, numbers), **options), ours, change)
    for group in optimizer.param_groups:
        theirs = parameters(dtype, shapes)
        own = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        reference = train(lambda params, own=own: cls(params, **{**options, **own}), theirs, change)
        for p, q in zip(ours, theirs, strict=True):
            if any(p is member for member in group["params"]):
                assert torch.equal(p, q)
                torch.testing.assert_close(saved_state(optimizer, p), saved_state(reference, q), rtol=0, atol=0)
    return calls


@pytest.mark.parametrize("addition", ADDITIONS)
@pytest.mark.parametrize("name", NAMES)
def test_groups_with_other_numbers_step_at_once(name, addition):
    dtype, options = ADDITIONS[addition]
    calls = assert_equal_bits(NUMBERS, getattr(fo, name), dtype, **{**RULES[name].varied, **options})
    kinds = 2 if options.get("moment_dtype") == torch.uint8 else 1  # small parameters have no codes
    assert len(calls.made()) == kinds
    assert calls.count("step_bucket_") == 4 * kinds


@pytest.mark.parametrize("name", NAMES)
def test_groups_step_as_in_torch(name):
    ours, theirs = parameters(torch.float32, SHAPES), parameters(torch.float32, SHAPES)
    train(lambda params: getattr(fo, name)(split(params), **RULES[name].varied), ours)
    train(lambda params: RULES[name].torch_class(split(params), foreach=False, **RULES[name].varied), theirs)
    assert_same(theirs, ours, torch.float32)


def test_70_groups_take_two_buckets():
    numbers = [{"lr": 1e-3 * (i + 1), "weight_decay": 0.01 * (i % 3)} for i in range(70)]
    calls = assert_equal_bits(numbers, fo.AdamW, shapes=[(1 + i % 5,) for i in range(140)])
    assert len(calls.made()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tensors", [(1,), (0, 2)])
def test_some_learning_rates_are_tensors(tensors, dtype):
    def run(as_tensors):
        def change(groups, step):
            for i in tensors:
                rate = 0.5**step
                groups[i]["lr"] = torch.tensor(rate, dtype=dtype) if as_tensors else rate

        params = parameters(torch.float32, SHAPES)
        train(lambda params: fo.SGD(split(params)), params, change)
        return params

    assert all(map(torch.equal, run(True), run(False)))


def test_numbers_that_change_in_all_groups_keep_the_buckets():
    def change(groups, step):
        for group in groups:
            group.update(betas=(0.5 + 0.1 * step, 0.99), lr=group["lr"], weight_decay=group["weight_decay"])

    assert len(assert_equal_bits(NUMBERS, fo.AdamW, change=change).made()) == 1


DIFFERENT = {
    "AdamW": [{"betas": (0.5, 0.9)}, {"eps": 0.1}, {"maximize": True}, {"amsgrad": False}, {"ema_decay": 0.5}],
    "SGD": [{"momentum": 0.3}, {"dampening": 0.2}, {"momentum": 0.0, "nesterov": False}, {"maximize": True}],
    "Lion": [{"betas": (0.5, 0.9)}, {"maximize": True}],
}
CASES = [(name, options) for name, each in DIFFERENT.items() for options in each]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_an_option_that_differs_for_two_steps_moves_a_group_out_of_the_bucket_and_back(name, options):
    def change(groups, step):
        before = {key: groups[0][key] for key in options if key in groups[0]}
        groups[1].update(options if step in (2, 3) else before)
        if step == 4 and "ema_decay" in options:
            del groups[1]["ema_decay"]

    def run(cls, **given):
        params = parameters(torch.float32, SHAPES)
        with Calls() as calls:
            train(lambda params: cls(split(params), **given, **RULES[name].varied), params, change, steps=6)
        return params, calls

    (theirs, _), (ours, calls) = run(RULES[name].torch_class, foreach=False), run(getattr(fo, name))
    assert_same(theirs, ours, torch.float32)
    assert calls.count("step_bucket_") == 1 * 4 + 2 * 2
    assert len(calls.made()) == 1 + 2 + 1


def test_a_seed_of_one_group_is_not_the_seed_of_others():
    def run(seeds):
        params = parameters(torch.bfloat16, SHAPES)
        groups = [{**group, "seed": seed} for group, seed in zip(split(params), seeds, strict=True)]
        train(lambda params: fo.SGD(groups, lr=0.1, stochastic_rounding=True), params)
        return [torch.cat([p.detach().flatten() for p in group["params"]]) for group in groups]

    equal = [torch.equal(*pair) for pair in zip(run([1, 1, 1]), run([1, 2, 1]), strict=True)]
    assert equal == [True, False, True]


def test_averages_of_each_group_have_its_decay():
    params = parameters(torch.float32, SHAPES)
    starts = [p.detach().clone() for p in params]
    groups = [{**group, "ema_decay": decay} for group, decay in zip(split(params), (0.0, 1.0, 0.0), strict=True)]
    optimizer = train(lambda params: fo.SGD(groups), params)
    expected = [*params[:2], *starts[2:4], *params[4:]]
    assert all(torch.equal(optimizer.state[p]["ema"], each) for p, each in zip(params, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_gradients_does_not_step(name):
    def run(cls, **given):
        params = parameters(torch.float32, SHAPES)

        def change(groups, step):
            for p in groups[step % 3]["params"] if step else params[:3]:
                p.grad = None

        optimizer = train(lambda params: cls(split(params), **given, **RULES[name].varied), params, change, steps=6)
        return params, [len(optimizer.state.get(p, ())) > 0 for p in params]

    (theirs, theirs_have), (ours, ours_have) = run(RULES[name].torch_class, foreach=False), run(getattr(fo, name))
    assert_same(theirs, ours, torch.float32)
    assert theirs_have == ours_have


def test_a_group_added_later_joins_the_bucket():
    params = parameters(torch.float32, SHAPES)
    optimizer = fo.AdamW(split(params)[:2])
    set_grads(params, 0)
    optimizer.step()
    optimizer.add_param_group(split(params)[2])
    with Calls() as calls:
        optimizer.step()
        optimizer.step()
    assert len(calls.made()) == 1
    assert [optimizer.state[p]["step"].item() for p in params] == [3, 3, 3, 3, 2, 2]


def test_parameters_that_share_memory_step_in_the_order_of_their_groups():
    def run(cls, **given):
        base = torch.linspace(-1, 1, 8)
        params = [torch.nn.Parameter(base[4 * i // 2 :][:4]) for i in (0, 1, 2)]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(params, (0.1, 0.2, 0.3), strict=True)]
        groups[1].update(momentum=0.5)  # alone, so that the bucket of the others would step first
        train(lambda params: cls(groups, momentum=0.9, weight_decay=0.5, **given), params, steps=3)
        return base

    assert_same([run(torch.optim.SGD, foreach=False)], [run(fo.SGD)], torch.float32)


def test_a_skipped_step_skips_all_groups():
    params = parameters(torch.float32, SHAPES)
    optimizer = fo.AdamW(split(params))
    for bad in (False, True, False):
        set_grads(params, 0)
        if bad:
            params[-1].grad[-1] = torch.inf
        before = [p.detach().clone() for p in params]
        fo.update(optimizer, inv_scale=torch.tensor(0.5))
        assert all(torch.equal(*pair) for pair in zip(before, params, strict=True) if pair[0].numel()) == bad
    assert {state["step"].item() for state in optimizer.state.values()} == {2}

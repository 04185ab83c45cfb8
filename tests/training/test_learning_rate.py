"""Learning rates for other batch sizes: torch's schedules at the user's steps, times a factor with warm-up."""

import copy
import itertools
import json
import math
import re
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.optim import SGD, lr_scheduler, swa_utils
from torch.utils.data import DataLoader

import flatout.optim as fo
from flatout.training.learning_rate import LR_RULES, ScaledSchedule, lr_factor, rule_for

LRS = (0.1, 0.02, 0.3)
"""Rates of the parameter groups."""

MOST = 100
"""Largest number of steps that every scheduler here supports."""


def optimizer_of(tensor=False, lrs=LRS, momentum=0.9):
    groups = [{"params": [Parameter(torch.zeros(2))], "lr": torch.tensor(lr) if tensor else lr} for lr in lrs]
    return SGD(groups, momentum=momentum)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def change(group, lr):
    """Set a learning rate as users and torch's schedulers do."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def in_a_row(optimizer):
    constant = lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=10)
    return lr_scheduler.SequentialLR(optimizer, [constant, lr_scheduler.ExponentialLR(optimizer, 0.9)], [12])


def chained(optimizer):
    constant = lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=10)
    return lr_scheduler.ChainedScheduler([constant, lr_scheduler.ExponentialLR(optimizer, 0.9)])


def from_to(start, end, part):
    """Return the value at a part of half a cosine wave."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def restarting(n, lr):
    """Return the rate for periods of 8, 16, 32 and 64 steps, which start after 0, 8, 24 and 56 steps."""
    begin, period = next((b, p) for b, p in ((56, 64), (24, 32), (8, 16), (0, 8)) if n >= b)
    return from_to(lr, 1e-3, (n - begin) / period)


def cyclic(n, lr):
    """Return the rate for cycles of six steps from lr up to 3 lr and ten steps down."""
    phase = n % 16
    return lr + 2 * lr * (phase / 6 if phase <= 6 else (16 - phase) / 10)


def one_cycle(n, lr):
    """Return the rate in 100 steps: from 0.4 lr to 10 lr at step 29, then to 0.4e-4 lr at step 99."""
    return from_to(0.4 * lr, 10 * lr, n / 29) if n <= 29 else from_to(10 * lr, 0.4e-4 * lr, (n - 29) / 70)


# Constructor of the scheduler, and a formula for its rate after n steps from an initial lr.
SCHEDULERS = {
    "LambdaLR": (lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)), lambda n, lr: lr / (1 + n)),
    "MultiplicativeLR": (lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.97), lambda n, lr: lr * 0.97**n),
    "StepLR": (lambda o: lr_scheduler.StepLR(o, 7, gamma=0.5), lambda n, lr: lr * 0.5 ** (n // 7)),
    "MultiStepLR": (
        lambda o: lr_scheduler.MultiStepLR(o, [5, 20, 40], gamma=0.3),
        lambda n, lr: lr * 0.3 ** ((n >= 5) + (n >= 20) + (n >= 40)),
    ),
    "ConstantLR": (
        lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=10),
        lambda n, lr: lr / 4 if n < 10 else lr,
    ),
    "LinearLR": (
        lambda o: lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=30),
        lambda n, lr: lr * (0.2 + 0.8 * min(n, 30) / 30),
    ),
    "ExponentialLR": (lambda o: lr_scheduler.ExponentialLR(o, 0.95), lambda n, lr: lr * 0.95**n),
    "PolynomialLR": (
        lambda o: lr_scheduler.PolynomialLR(o, total_iters=50, power=2),
        lambda n, lr: lr * (1 - min(n, 50) / 50) ** 2,
    ),
    "CosineAnnealingLR": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=1e-3),
        lambda n, lr: from_to(lr, 1e-3, n / 20),
    ),
    "CosineAnnealingWarmRestarts": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 8, T_mult=2, eta_min=1e-3),
        restarting,
    ),
    "CyclicLR": (
        lambda o: lr_scheduler.CyclicLR(o, list(LRS), [3 * lr for lr in LRS], step_size_up=6, step_size_down=10),
        cyclic,
    ),
    "OneCycleLR": (lambda o: lr_scheduler.OneCycleLR(o, [10 * lr for lr in LRS], total_steps=MOST), one_cycle),
    "SequentialLR": (in_a_row, lambda n, lr: lr * (0.1 if n < 10 else 1 if n < 12 else 0.9 ** (n - 12))),
    "ChainedScheduler": (chained, lambda n, lr: lr * (0.5 if n < 10 else 1) * 0.9**n),
    "SWALR": (
        lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=10, anneal_strategy="linear"),
        lambda n, lr: lr + (0.05 - lr) * min(n, 10) / 10,
    ),
}

STEPPED_BY_USERS = {"ReduceLROnPlateau"}


def scheduler_of(name, optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch's own schedulers
        return SCHEDULERS[name][0](optimizer)


def weight(u, factor, warmup):
    return factor if factor <= 1 or u >= warmup else 1 + (factor - 1) * (u / warmup)


def updated(optimizer, switch, updates=1):
    for _ in range(updates):
        optimizer.step()
        switch.step()


def scaled(optimizer, scheduler=None, *, factor=4.0, warmup=0, per_update=1, on=True):
    switch = ScaledSchedule(optimizer, scheduler, factor=factor, warmup=warmup, per_update=Fraction(per_update))
    if on:
        switch.enable()
    return switch


class Bare:
    """User's own loop with the same schedule on a separate optimizer."""

    def __init__(self, name, tensor=False):
        self.optimizer = optimizer_of(tensor)
        self.scheduler = scheduler_of(name, self.optimizer)
        self.steps = 0

    def go_to(self, steps):
        while self.steps < steps:
            self.optimizer.step()
            self.scheduler.step()
            self.steps += 1

    def weighted(self, weight):
        return [float(group["lr"] * weight) for group in self.optimizer.param_groups]


PER_UPDATE = [Fraction(1), Fraction(4), Fraction(5, 2), Fraction(1, 3)]
FACTORS = [4.0, math.sqrt(2), 0.5]

names = st.sampled_from(sorted(SCHEDULERS))
per_updates = st.sampled_from(PER_UPDATE) | st.fractions(Fraction(1, 16), 16, max_denominator=50)
factors = st.sampled_from(FACTORS) | st.floats(1 / 64, 64)


@st.composite
def histories(draw):
    """Draw options of a scaled schedule, and a number of updates that every scheduler supports."""
    per_update = draw(per_updates)
    options = {"factor": draw(factors), "warmup": draw(st.integers(0, 12)), "per_update": per_update}
    return options, draw(st.integers(0, min(25, math.floor(MOST / per_update))))


# ---- the factor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "before", "after", "factor"),
    [
        ("linear", 32, 128, 4.0),
        ("linear", 256, 8192, 32.0),  # Goyal et al. (2017): 0.1 for 256 images, 3.2 for 8192
        ("linear", 128, 96, 0.75),
        ("linear", 7, 7, 1.0),
        ("sqrt", 32, 128, 2.0),
        ("sqrt", 100, 50, 0.7071067811865476),
        ("sqrt", 64, 128, 1.4142135623730951),
        ("none", 32, 128, 1.0),
    ],
)
def test_the_factor_of_a_rule(rule, before, after, factor):
    assert lr_factor(rule, before, after) == factor


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [(("cube", 1, 2), "rule.*'cube'"), (("linear", 0, 2), "before.*0"), (("none", 4, -1), "after.*-1")],
)
def test_a_factor_of_nothing(arguments, facts):
    with pytest.raises(ValueError, match=facts):
        lr_factor(*arguments)


class Wrapping(torch.optim.Optimizer):
    """Optimizer that steps another one, as accelerate's and SAM's do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


class MySGD(SGD):
    pass


RULES = {
    SGD: "linear",
    MySGD: "linear",
    fo.SGD: "linear",
    torch.optim.ASGD: "linear",
    torch.optim.Adam: "sqrt",
    torch.optim.AdamW: "sqrt",
    torch.optim.NAdam: "sqrt",
    torch.optim.RAdam: "sqrt",
    torch.optim.Adamax: "sqrt",
    torch.optim.RMSprop: "sqrt",
    torch.optim.Adagrad: "sqrt",
    torch.optim.Adafactor: "sqrt",
    fo.Adam: "sqrt",
    fo.AdamW: "sqrt",
    fo.Lion: "sqrt",
}


@pytest.mark.parametrize("cls", RULES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_subclasses_and_wrappers_have_the_rule_of_their_optimizer(cls):
    optimizer = cls([Parameter(torch.zeros(2))], lr=0.1)
    assert rule_for(optimizer) == RULES[cls]
    wrapped = Wrapping(Wrapping(optimizer))
    assert rule_for(wrapped) == RULES[cls]
    optimizer.outer = wrapped  # a cycle of references
    assert rule_for(wrapped) == RULES[cls]
    assert RULES[cls] in LR_RULES


def test_a_fused_optimizer_has_the_rule_of_its_class():
    for cls in (SGD, torch.optim.AdamW):
        optimizer = cls([Parameter(torch.zeros(2))], lr=0.1)
        assert rule_for(fo.fuse(optimizer)) == RULES[cls]


@pytest.mark.parametrize("rule", LR_RULES)
def test_every_rule_has_a_factor(rule):
    assert lr_factor(rule, 8, 8) == 1


# ---- the warm-up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "warmup", "expected"),
    [
        (4.0, 6, [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4]),
        (4.0, 1, [0.1, 0.4, 0.4]),
        (4.0, 0, [0.4, 0.4]),
        (2.0, 4, [0.1, 0.125, 0.15, 0.175, 0.2, 0.2]),
        (1.0, 4, [0.1, 0.1]),
        (0.5, 4, [0.05, 0.05, 0.05]),
        (0.5, 0, [0.05, 0.05]),
    ],
)
def test_a_warm_up_begins_at_the_users_rate_and_ends_at_the_scaled_one(factor, warmup, expected):
    optimizer = optimizer_of(lrs=[0.1])
    switch = scaled(optimizer, factor=factor, warmup=warmup)
    for rate in expected:
        assert rates(optimizer) == [pytest.approx(rate, rel=1e-15)]
        updated(optimizer, switch)


def test_the_schedule_is_not_delayed_by_the_warm_up():
    optimizer = optimizer_of(lrs=[0.8])
    switch = scaled(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), warmup=3)
    for rate in (0.8, 0.4 * 2, 0.2 * 3, 0.1 * 4, 0.05 * 4):
        assert rates(optimizer) == [pytest.approx(rate, rel=1e-15)]
        updated(optimizer, switch)


@pytest.mark.parametrize("make", [SGD, fo.SGD, lambda groups: fo.fuse(SGD(groups, 1.0))], ids=["torch", "own", "fused"])
def test_updates_use_the_rates(make):
    p = Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = make([{"params": [p], "lr": 0.1}])
    switch = scaled(optimizer, lr_scheduler.StepLR(optimizer, 20, gamma=0.1), warmup=6, per_update=Fraction(5, 2))
    for _ in range(9):
        p.grad = torch.ones_like(p)
        updated(optimizer, switch)
    moved = 0.1 + 0.15 + 0.2 + 0.25 + 0.3 + 0.35 + 0.4 + 0.4 + 0.04  # after update 8 the schedule is at step 20
    torch.testing.assert_close(p.detach(), torch.full_like(p, -moved), rtol=1e-12, atol=0)


# ---- torch's schedulers ------------------------------------------------------------------------------------


def test_every_scheduler_of_torch_is_among_them():
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    new = found - {"LRScheduler", "_LRScheduler"} - STEPPED_BY_USERS - SCHEDULERS.keys()
    assert not new, f"torch has {new}: add it"


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("per_update", PER_UPDATE, ids=str)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_match_the_formulas(name, factor, per_update, tensor):
    optimizer = optimizer_of(tensor)
    switch = scaled(optimizer, scheduler_of(name, optimizer), factor=factor, warmup=6, per_update=per_update)
    by_hand = SCHEDULERS[name][1]
    for u in range(25):
        steps = u * per_update.numerator // per_update.denominator
        expected = [by_hand(steps, lr) * weight(u, factor, 6) for lr in LRS]
        assert rates(optimizer) == pytest.approx(expected, rel=1e-4 if tensor else 1e-9, abs=1e-7 if tensor else 1e-15)
        updated(optimizer, switch)


@settings(max_examples=200)
@given(names, histories(), st.booleans())
def test_every_bit_is_the_bare_schedules_times_the_weight(name, history, tensor):
    options, updates = history
    optimizer, bare = optimizer_of(tensor), Bare(name, tensor)
    scheduler = scheduler_of(name, optimizer)
    objects = [group["lr"] for group in optimizer.param_groups]
    switch = scaled(optimizer, scheduler, **options)
    for u in range(updates + 1):
        bare.go_to(math.floor(u * options["per_update"]))
        expected = bare.weighted(weight(u, options["factor"], options["warmup"]))
        assert rates(optimizer) == expected
        assert switch.get_last_lr() == expected
        assert [float(rate) for rate in scheduler.get_last_lr()] == expected
        for group, twin in zip(optimizer.param_groups, bare.optimizer.param_groups, strict=True):
            assert group["momentum"] == twin["momentum"]
        if u < updates:
            updated(optimizer, switch)
    if tensor:
        assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, objects, strict=True))
        told = scheduler.get_last_lr()
        assert not any(rate is group["lr"] for rate, group in zip(told, optimizer.param_groups, strict=True))


class HalvesWhatItTold(lr_scheduler.LRScheduler):
    """Scheduler that computes rates from its last reported rates, unlike torch's schedulers."""

    def get_lr(self):
        if self.last_epoch == 0:
            return [group["lr"] for group in self.optimizer.param_groups]
        return [rate / 2 for rate in self._last_lr]


def test_a_scheduler_that_computes_from_its_last_rates():
    optimizer = optimizer_of(lrs=[0.8])
    switch = scaled(optimizer, HalvesWhatItTold(optimizer))
    for rate in (3.2, 1.6, 0.8):
        assert rates(optimizer) == [rate]
        updated(optimizer, switch)


class OnlySteps:
    """Scheduler that is no subclass of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def test_a_scheduler_that_is_none_of_torchs():
    optimizer = optimizer_of(lrs=[0.8])
    scheduler = OnlySteps(optimizer)
    switch = scaled(optimizer, scheduler)
    updated(optimizer, switch, 2)
    assert rates(optimizer) == [0.8]
    assert vars(scheduler) == {"optimizer": optimizer}


# ---- the schedule's own units ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_update", "steps"),
    [
        (Fraction(4), [0, 4, 8, 12, 16]),
        (Fraction(1), [0, 1, 2, 3, 4]),
        (Fraction(5, 2), [0, 2, 5, 7, 10]),
        (Fraction(1, 3), [0, 0, 0, 1, 1, 1, 2]),
        (Fraction(49, 50), [0, 0, 1, 2, 3]),
    ],
    ids=str,
)
def test_steps_of_the_scheduler(per_update, steps):
    optimizer = optimizer_of()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    switch = scaled(optimizer, scheduler, per_update=per_update)
    for expected in steps:
        assert scheduler.last_epoch == expected
        updated(optimizer, switch)


@settings(max_examples=60)
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 3),
)
@example(49, 49, 1, False, 1, 3)  # 49 * (1 / 49) < 1 in floats
def test_never_more_steps_than_the_users_loop_gives(samples, old, new, drop_last, accumulate, epochs):
    """The limit holds for all epochs, after which OneCycleLR raises, and for the samples seen so far."""

    def updates_of(batch_size):
        return math.ceil(len(DataLoader(range(samples), batch_size, drop_last=drop_last)) / accumulate)

    before, now = updates_of(old), updates_of(new)
    assume(before and now)
    optimizer = optimizer_of()
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * before)
    switch = scaled(optimizer, scheduler, per_update=Fraction(before, now))
    for epoch in range(epochs):
        for update in range(epoch * now + 1, (epoch + 1) * now + 1):
            updated(optimizer, switch)
            assert scheduler.last_epoch * now <= update * before < (scheduler.last_epoch + 1) * now
        assert scheduler.last_epoch == (epoch + 1) * before


def test_a_scheduler_that_ends_leaves_scaled_rates():
    optimizer = optimizer_of(lrs=[0.1])
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    switch = scaled(optimizer, scheduler)
    updated(optimizer, switch, 5)
    before = rates(optimizer)
    with pytest.raises(ValueError, match="Tried to step 6 times"):
        updated(optimizer, switch)
    assert rates(optimizer) == switch.get_last_lr() == scheduler.get_last_lr() == before


# ---- rates that others change ------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_users_plateau(tensor):
    optimizer = optimizer_of(tensor, lrs=[0.1, 0.01])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    switch = scaled(optimizer, lr_scheduler.StepLR(optimizer, 4, gamma=0.5), warmup=2)
    near = 1e-6 if tensor else 1e-14
    plateau.step(1.0)
    updated(optimizer, switch)
    assert rates(optimizer) == pytest.approx([0.25, 0.025], rel=near)
    plateau.step(2.0)
    assert rates(optimizer) == pytest.approx([0.025, 0.0025], rel=near)
    updated(optimizer, switch)
    assert rates(optimizer) == pytest.approx([0.04, 0.004], rel=near)
    updated(optimizer, switch, 2)
    assert rates(optimizer) == pytest.approx([0.02, 0.002], rel=near)
    plateau.step(3.0)
    switch.disable()
    assert rates(optimizer) == pytest.approx([0.0005, 0.00005], rel=near)


@given(st.floats(1e-6, 10), factors, st.integers(1, 30), st.booleans())
def test_a_rate_is_changed_once_and_does_not_drift(lr, factor, warmup, tensor):
    optimizer = optimizer_of(tensor)
    switch = scaled(optimizer, factor=factor, warmup=warmup)
    updated(optimizer, switch, 3)
    untouched, group, _ = optimizer.param_groups
    change(group, lr)
    raw, other = group["lr"] / weight(3, factor, warmup), optimizer_of(tensor).param_groups[0]["lr"]
    for u in range(4, 40):
        updated(optimizer, switch)
        assert group["lr"] == raw * weight(u, factor, warmup)
        assert untouched["lr"] == other * weight(u, factor, warmup)
    switch.disable()
    assert (group["lr"], untouched["lr"]) == (raw, other)


@pytest.mark.parametrize("value", [1.25, 0.25], ids=["the same", "another"])
@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False)], ids=["to tensor", "to number"])
def test_a_rate_becomes_another_kind_of_number(first, second, value):
    optimizer = optimizer_of(first, lrs=[0.5])
    switch = scaled(optimizer, warmup=2)
    updated(optimizer, switch)
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(value) if second else value
    updated(optimizer, switch)
    assert rates(optimizer) == [pytest.approx(value * 4 / 2.5, rel=1e-6)]
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) is second
    assert not second or optimizer.param_groups[0]["lr"] is rate


def test_groups_added_later():
    optimizer = optimizer_of(lrs=[0.1])
    switch = scaled(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), warmup=2)
    updated(optimizer, switch)
    optimizer.add_param_group({"params": [Parameter(torch.zeros(1))], "lr": 0.8})
    optimizer.add_param_group({"params": [Parameter(torch.zeros(1))], "lr": torch.tensor(0.4)})
    assert switch.get_last_lr() == pytest.approx([0.125, 0.8, 0.4])
    updated(optimizer, switch)
    assert rates(optimizer) == pytest.approx([0.1, 1.6, 0.8])
    optimizer.add_param_group({"params": [Parameter(torch.zeros(1))], "lr": 0.3})
    switch.disable()
    assert rates(optimizer) == pytest.approx([0.025, 0.4, 0.2, 0.3])


def test_a_group_that_is_taken_out():
    optimizer = optimizer_of(lrs=[0.1, 0.2])
    switch = scaled(optimizer)
    del optimizer.param_groups[0]
    updated(optimizer, switch)
    assert rates(optimizer) == [0.8]
    switch.disable()
    assert rates(optimizer) == [0.2]


def test_nothing_waits_for_a_rate_on_the_device():
    """Tensors on "meta" have no values, so any read of a rate raises."""
    optimizer = optimizer_of(lrs=[0.1])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    switch = scaled(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9), warmup=3, per_update=Fraction(3, 2))
    with pytest.raises(RuntimeError, match="meta"):
        switch.get_last_lr()
    updated(optimizer, switch, 5)
    switch.disable()


def test_a_rate_of_one_element_and_a_rate_that_is_an_integer():
    optimizer = SGD([{"params": [Parameter(torch.zeros(1))], "lr": lr} for lr in (torch.tensor([0.25]), 1)])
    switch = scaled(optimizer, warmup=3)
    assert rates(optimizer) == [0.25, 1]
    updated(optimizer, switch, 3)
    assert rates(optimizer) == [1.0, 4]
    switch.disable()
    assert rates(optimizer) == [0.25, 1]
    assert optimizer.param_groups[0]["lr"].shape == (1,)
    assert isinstance(optimizer.param_groups[1]["lr"], int)


# ---- on and off --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=4), factors, st.integers(0, 3), st.booleans())
def test_on_and_off_at_once_gives_every_bit_back(lrs, factor, warmup, tensor):
    optimizer = optimizer_of(tensor, lrs)
    before, objects = rates(optimizer), [group["lr"] for group in optimizer.param_groups]
    switch = scaled(optimizer, factor=factor, warmup=warmup, on=False)
    for _ in range(3):
        switch.enable()
        switch.disable()
    assert rates(optimizer) == before
    assert not tensor or all(g["lr"] is rate for g, rate in zip(optimizer.param_groups, objects, strict=True))


@settings(max_examples=150)
@given(names, histories(), st.booleans())
def test_off_later_gives_the_schedule_as_if_it_had_never_been_wrapped(name, history, tensor):
    options, updates = history
    optimizer, bare = optimizer_of(tensor), Bare(name, tensor)
    scheduler = scheduler_of(name, optimizer)
    switch = scaled(optimizer, scheduler, **options)
    updated(optimizer, switch, updates)
    switch.disable()
    steps = math.floor(updates * options["per_update"])
    bare.go_to(steps)
    for step in range(steps, min(steps + 10, MOST) + 1):
        assert rates(optimizer) == rates(bare.optimizer)
        assert scheduler.state_dict() == bare.scheduler.state_dict()
        assert optimizer.state_dict()["param_groups"] == bare.optimizer.state_dict()["param_groups"]
        if step < MOST:
            optimizer.step()
            scheduler.step()
            bare.go_to(step + 1)


def test_disabled_the_scheduler_gets_the_users_steps_and_enabled_again_the_warm_up_continues():
    optimizer = optimizer_of(lrs=[1.0])
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda n: 1 / 2**n)
    switch = scaled(optimizer, scheduler, warmup=3, per_update=Fraction(3, 2))
    updated(optimizer, switch)
    assert rates(optimizer) == [2 / 2]
    switch.disable()
    updated(optimizer, switch, 3)
    assert rates(optimizer) == [1 / 16]
    switch.enable()
    assert rates(optimizer) == [2 / 16]
    updated(optimizer, switch)
    assert rates(optimizer) == [3 / 64], "two steps: three of the user's for two updates"
    switch.disable()
    scaled(optimizer, None, on=False).step()
    assert rates(optimizer) == [1 / 64]


@pytest.mark.parametrize(
    ("factor", "warmup", "numbers"),
    [(4.0, 50, ["4", "50"]), (4.0, 1, ["4", "1"]), (math.sqrt(2), 0, ["1.414"]), (0.5, 50, ["0.5"])],
)
def test_its_label_has_the_factor_and_the_updates_of_a_warm_up(factor, warmup, numbers):
    switch = scaled(optimizer_of(), factor=factor, warmup=warmup, on=False)
    assert re.findall(r"[\d.]+", switch.label) == numbers


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"factor": 0.0}, "factor.*0.0"),
        ({"factor": math.inf}, "factor.*inf"),
        ({"factor": math.nan}, "factor.*nan"),
        ({"warmup": -1}, "warmup.*-1"),
        ({"per_update": Fraction(0)}, "per_update.*0"),
    ],
)
def test_numbers_that_make_no_sense(options, facts):
    with pytest.raises(ValueError, match=facts):
        scaled(optimizer_of(), **options)


# ---- saving and loading ------------------------------------------------------------------------------------


def fresh(name, tensor, options, on):
    optimizer = optimizer_of(tensor)
    return optimizer, scaled(optimizer, scheduler_of(name, optimizer), **options, on=on)


@settings(max_examples=150)
@given(
    names,
    histories(),
    st.integers(0, 25),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["before it was built", "before", "after"]),
    st.none() | st.floats(1e-4, 1),
)
def test_stopped_training_resumes_with_the_same_rates(name, history, at, tensor, on, load, changed):
    """The order of loading does not matter, nor does a rate changed just before."""
    options, updates = history
    at = min(at, updates)
    optimizer, switch = fresh(name, tensor, options, True)
    updated(optimizer, switch, at)
    if changed is not None:
        change(optimizer.param_groups[0], changed)
    saved, state = copy.deepcopy((optimizer.state_dict(), switch.state_dict()))

    other = optimizer_of(tensor)
    if load == "before it was built":
        other.load_state_dict(saved)
    scheduler = scheduler_of(name, other)
    again = scaled(other, scheduler, **options, on=on)
    if load == "before":
        other.load_state_dict(saved)
    again.load_state_dict(state)
    if load == "after":
        other.load_state_dict(saved)
    again.enable()  # enabled when it was saved

    for u in range(at, updates + 1):
        assert rates(other) == rates(optimizer)
        assert [float(rate) for rate in scheduler.get_last_lr()] == rates(other)
        if u < updates:
            updated(optimizer, switch)
            updated(other, again)
    switch.disable()
    again.disable()
    assert rates(other) == rates(optimizer)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_state_may_be_loaded_again_and_again(name, tensor):
    optimizer, switch = fresh(name, tensor, {"warmup": 7, "per_update": Fraction(5, 2)}, True)
    updated(optimizer, switch, 4)
    saved, state = copy.deepcopy((optimizer.state_dict(), switch.state_dict()))
    untouched = copy.deepcopy(state)
    seen = []
    for _ in range(3):
        seen.append([])
        for _ in range(6):
            updated(optimizer, switch)
            seen[-1].append(rates(optimizer))
        optimizer.load_state_dict(copy.deepcopy(saved))
        switch.load_state_dict(state)
        assert state == untouched
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_state_that_was_saved_off_is_loaded_off(tensor):
    options = {"warmup": 2}
    optimizer, switch = fresh("ExponentialLR", tensor, options, True)
    updated(optimizer, switch)
    switch.disable()
    updated(optimizer, switch)
    other, again = fresh("ExponentialLR", tensor, options, True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(copy.deepcopy(switch.state_dict()))
    for _ in range(3):
        assert rates(other) == rates(optimizer)
        updated(other, again)
        updated(optimizer, switch)
    again.enable()
    switch.enable()
    assert rates(other) == rates(optimizer)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_state_is_of_plain_numbers(tensor):
    optimizer = optimizer_of(tensor)
    switch = scaled(optimizer, factor=math.sqrt(2), warmup=7, per_update=Fraction(5, 3))
    updated(optimizer, switch, 3)
    state = switch.state_dict()
    assert json.loads(json.dumps(state)) == state
    before = rates(optimizer)
    updated(optimizer, switch, 2)
    switch.load_state_dict(json.loads(json.dumps(state)))
    assert rates(optimizer) == before


DIFFERING = {
    "factor": ({"factor": 2.0}, "factor.*4.0.*2.0"),
    "warmup": ({"warmup": 5}, "warmup.*3.*5"),
    "per_update": ({"per_update": Fraction(7, 2)}, "per_update.*5/2.*7/2"),
    "all": (
        {"factor": 0.5, "warmup": 0, "per_update": Fraction(2)},
        "factor.*4.0.*0.5.*warmup.*3.*0.*per_update.*5/2.*2",
    ),
    "scheduler": ({"scheduler": None}, "scheduler"),
    "groups": ({"groups": 2}, "3.*groups.*2"),
}
"""Differences of another schedule, and the facts in the error."""


@pytest.mark.parametrize(("of", "on"), list(itertools.product(DIFFERING, [True, False])))
def test_a_state_of_another_schedule_is_refused_and_changes_nothing(of, on):
    changes, facts = DIFFERING[of]
    options = {"factor": 4.0, "warmup": 3, "per_update": Fraction(5, 2)}
    optimizer, switch = fresh("StepLR", False, options, True)
    updated(optimizer, switch, 8)
    state = copy.deepcopy(switch.state_dict())

    other = optimizer_of(lrs=LRS[: changes.get("groups", 3)])
    scheduler = None if "scheduler" in changes else lr_scheduler.StepLR(other, 7, gamma=0.5)
    mine = options | {k: v for k, v in changes.items() if k in options}
    again = scaled(other, scheduler, **mine, on=on)
    updated(other, again)
    before = copy.deepcopy((again.state_dict(), other.state_dict()))
    with pytest.raises(ValueError, match=facts):
        again.load_state_dict(state)
    assert (again.state_dict(), other.state_dict()) == before

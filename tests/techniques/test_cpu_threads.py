"""The number of threads is tried, kept and given back."""

import pytest
import torch
from torch.nn import functional

import flatout
from flatout.techniques import cpu_threads
from flatout.techniques.cpu_threads import CpuThreads, ThreadsSwitch
from tests.helpers import trained_state
from tests.jobs import QUICK, make_job

REST = QUICK | {"in_memory": False, "fused_optimizer": False}


def optimized(choice=None, budget=0.0, **more):
    model, loader, opt = make_job()
    techniques = REST | ({} if choice is None else {"cpu_threads": choice})
    return flatout.optimize(
        model, loader, opt, functional.cross_entropy, techniques=techniques, budget=budget, device="cpu", **more
    )


def test_the_number_is_set_and_given_back():
    before = torch.get_num_threads()
    run = optimized(1)
    assert torch.get_num_threads() == 1
    assert run.plan.decisions["cpu_threads"] == 1
    run.undo()
    assert torch.get_num_threads() == before


def test_a_plan_brings_the_number():
    plan = optimized(1).plan
    torch.set_num_threads(2)
    model, loader, opt = make_job()
    flatout.optimize(model, loader, opt, functional.cross_entropy, plan=plan, device="cpu")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", 100_000])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"techniques\['cpu_threads'\]"):
        optimized(value)


@pytest.mark.parametrize(
    ("cores", "threads", "tried"),
    [(1, 1, []), (1, 4, [1]), (2, 2, [1]), (2, 1, [2]), (8, 8, [4, 1]), (8, 64, [8, 4, 1]), (3, 3, [1])],
)
def test_what_is_tried(cores, threads, tried, monkeypatch):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert CpuThreads._numbers() == tried


def test_one_core_has_nothing_to_try(monkeypatch):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 1)
    torch.set_num_threads(1)
    row = optimized(budget=1).report.row("cpu_threads")
    assert row.status == "not applicable"
    assert "one core" in row.why


@pytest.mark.usefixtures("short_trials")
def test_trials_leave_the_number_and_the_training_as_they_were(monkeypatch):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 4)
    model, loader, opt = make_job()
    before, threads = trained_state(model, opt), torch.get_num_threads()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, techniques=REST, budget=30, device="cpu")
    row = run.report.row("cpu_threads")
    assert row.status in ("kept", "rejected")
    assert row.trials
    # A candidate that is hopeless on its first pair is not compared.
    assert all(trial.loss_difference is not None for trial in row.trials if trial.pairs > 1)
    run.undo()
    assert torch.get_num_threads() == threads
    assert trained_state(model, opt) == before


def test_timing_decides_nothing_where_bits_matter():
    row = optimized(budget=5, deterministic=True).report.row("cpu_threads")
    assert row.status == "not tried"


def test_the_switch_is_exact_however_often():
    torch.set_num_threads(2)
    switch = ThreadsSwitch(1)
    for _ in range(3):
        switch.enable()
        switch.enable()
        assert torch.get_num_threads() == 1
        switch.disable()
        switch.disable()
        assert torch.get_num_threads() == 2
    assert (switch.label, ThreadsSwitch(2).label) == ("1 thread", "2 threads")

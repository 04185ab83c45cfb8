"""Engine: scripts train as without it, run faster if a technique pays, and stay within the time limit."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.autotune import module_tuning
from flatout.autotune.engine import Engine
from flatout.autotune.module_tuning import Options
from flatout.autotune.script_report import ScriptReport
from flatout.optim.native_step import NativeStep
from flatout.report.model import Gain, Row
from flatout.techniques import Measured
from flatout.tuning import agenda, budget, race
from flatout.tuning.bench import Bench
from flatout.tuning.budget import FIRST_SECONDS, SHARE
from flatout.tuning.race import Outcome
from flatout.tuning.tuner import Tuner
from tests.autotune.scripts import (
    LEFT_ALONE,
    SCRIPTS,
    Script,
    accumulating,
    batches,
    clipped,
    loader,
    net,
    plain,
    train,
)
from tests.clock import Clock, TimedSamples
from tests.jobs import NO_TECHNIQUES, only
from tests.reasons import reasons

UPDATES = 40


@contextmanager
def engine(said: list[str] | None = None, **options: Any) -> Iterator[Engine]:
    made = Engine(Options(**options), [].append if said is None else said.append)
    try:
        yield made
    finally:
        made.undo()


def slowed(clock: Clock, seconds: float = 0.01) -> Callable[[nn.Module], object]:
    """Return a function that delays each forward of a module."""
    return lambda module: clock.slow_down(module, seconds)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("script", [*SCRIPTS, *LEFT_ALONE])
def test_trials_leave_no_trace_in_the_training(script: Script, clock: Clock) -> None:
    expected = script(UPDATES, slowed(clock)).tensors()
    said: list[str] = []
    quick = {"compile": False, "torchscript": False, "in_memory": False, "workers": False}
    with engine(said, techniques=quick, is_dry=True) as running:
        found = script(UPDATES, slowed(clock)).tensors()
        tuned = [tuning.name for tuning in running.tunings if tuning.spent]
    assert bool(tuned) is (script in SCRIPTS)
    assert not said or script in LEFT_ALONE
    assert_same(found, expected)


@pytest.mark.parametrize("script", [plain, clipped, accumulating])
def test_what_is_kept_trains_the_same(script: Script, clock: Clock) -> None:
    expected = script(UPDATES, slowed(clock)).tensors()
    with engine(techniques=NO_TECHNIQUES | {"fused_optimizer": True}) as running:
        trained = script(UPDATES, slowed(clock))
        assert all(isinstance(optimizer, NativeStep) for optimizer in trained.optimizers)
        assert [row.status for row in running.tunings[0].report.rows if row.technique == "fused_optimizer"] == ["kept"]
    assert not any(isinstance(optimizer, NativeStep) for optimizer in trained.optimizers)
    for one, other in zip(trained.tensors(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.001)


def test_tuning_takes_its_share_of_the_time(clock: Clock) -> None:
    """A trial may exceed the share once. The script then trains for the rest of the time before the next trial."""
    seconds = 0.1
    with engine(techniques=only("fused_optimizer", "cpu_threads", "channels_last")) as running:
        plain(2000, slowed(clock, seconds))
        allowance = running.allowance
        assert allowance is not None
        assert all(tuning.is_done for tuning in running.tunings)
        assert 0 < allowance.spent < FIRST_SECONDS + SHARE * allowance.trained


@pytest.mark.parametrize("seconds", [0.0, 0.05, 3.0])
def test_a_budget_limits_the_tuning(seconds: float, clock: Clock) -> None:
    said: list[str] = []
    with engine(said, budget=seconds, techniques=only("fused_optimizer")) as running:
        trained = plain(400, slowed(clock))
        report = ScriptReport.of(running)
    assert sum(tuning.spent for tuning in running.tunings) <= 1.5 * seconds
    assert report.tuning_seconds <= 1.5 * seconds
    assert bool(report.modules) is (seconds > 0.05)
    if seconds == 0:
        assert running._recorder is None
        assert [reasons(text) for text in said] == [{"budget-spent"}]
        assert not any(isinstance(optimizer, NativeStep) for optimizer in trained.optimizers)
    elif not report.modules:
        assert "budget-spent" in reasons(str(report))


def called(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 8))


def not_called(model: nn.Module) -> torch.Tensor:
    return functional.linear(torch.randn(4, 8), model[0].weight)


@pytest.mark.parametrize(
    ("output", "updates", "why"),
    [(called, 30, {"updates-differ"}), (not_called, 30, {"no-training-calls"}), (called, 1, set())],
)
def test_the_report_says_why_updates_are_not_tuned(output: Any, updates: int, why: set[str]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with engine() as running:
        for update in range(updates):
            optimizer.zero_grad()
            for _ in range(update % 2 + 1):  # an update has one backward, the next two
                output(model).sum().backward()
            optimizer.step()
        assert reasons(str(ScriptReport.of(running))) == why
    has_numbers = "SGD, which has 5 parameters of BatchNorm1d, Linear," in str(ScriptReport.of(running))
    assert has_numbers is (output is not_called)


def test_a_scripts_log_has_no_records_of_the_tuning(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)  # as logging.basicConfig(level=logging.DEBUG) in a script
    with engine(techniques=only("fused_optimizer")) as running:
        plain(UPDATES, slowed(clock))
        assert running.tunings[0].report is not None
    assert [record for record in caplog.records if record.name.startswith("flatout")] == []


def test_slow_recorded_updates_delay_no_turn(clock: Clock) -> None:
    """The estimate for the first turn comes from the updates after the recorded ones."""
    passed = 0

    def slow_at_first(module: nn.Module) -> None:
        def delay(*_: object) -> None:
            nonlocal passed
            passed += 1
            clock.advance(10.0 if passed <= 2 else 0.1)

        module.register_forward_hook(delay)

    with engine(techniques=only("fused_optimizer")) as running:
        plain(UPDATES, slow_at_first)
        assert running.tunings[0].spent


def test_the_first_trial_is_of_what_promises_most(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes nine tenths of the time of this script."""
    tried: list[str] = []
    decide = Tuner.decide

    def noted(tuner: Tuner, technique: Measured) -> Row:
        row = decide(tuner, technique)
        tried.extend([row.technique] if row.trials else [])
        return row

    monkeypatch.setattr(Tuner, "decide", noted)
    for module in (budget, module_tuning):
        monkeypatch.setattr(module, "FIRST_SECONDS", 5.0)  # time for both
    model, source = net(), DataLoader(TimedSamples(clock, 0.004), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slowed(clock, 0.001)(model)
    with engine(techniques=only("fused_optimizer", "in_memory")):
        for _ in range(200):
            for x, y in source:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert tried[0] == "in_memory"


def test_a_technique_that_the_race_reverts_is_tried_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    model, races = net(), list[Outcome]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_hook(lambda *_: clock.advance(0.005 if isinstance(optimizer, NativeStep) else 0.01))
    times_as_fast = iter([0.5])

    def first_lost(bench: Bench) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            if (ratio := next(times_as_fast, None)) is not None:
                lost = Outcome(bench.pace, bench.pace, Gain(ratio, ratio, ratio))
                patch.setattr(race, "race_once", lambda *_: lost)
            races.append(race.race(bench))
        return races[-1]

    monkeypatch.setattr(agenda, "race", first_lost)
    with engine(techniques=only("fused_optimizer")) as running:
        train(model, optimizer, 2000)
        report = running.tunings[0].report
    assert report is not None
    assert len(races) == 2
    assert races[0].gain is None
    assert report.row("fused_optimizer").status == "kept"


def test_a_module_that_fails_is_said_once_and_left_as_it_was(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(UPDATES, slowed(clock)).tensors()

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a defect of flatout")

    monkeypatch.setattr(agenda.Agenda, "begin", fails)
    said: list[str] = []
    with engine(said) as running:
        found = plain(UPDATES, slowed(clock)).tensors()
        assert all(tuning.is_done for tuning in running.tunings)
        assert not ScriptReport.of(running).modules
    assert len(said) == 1
    assert "a defect of flatout" in said[0]
    assert_same(found, expected)


@pytest.mark.parametrize("part", ["of", "watched"])
def test_a_recording_that_fails_is_said_once_and_ends_the_tuning(
    part: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(UPDATES, slowed(clock)).tensors()

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a defect of flatout")

    monkeypatch.setattr(f"flatout.autotune.recorder.RecordedCall.{part}", fails)
    said: list[str] = []
    with engine(said) as running:
        found = plain(UPDATES, slowed(clock)).tensors()
    assert len(said) == 1
    assert str(ScriptReport.of(running)) == said[0]
    assert_same(found, expected)


def test_an_interrupted_trial_is_undone(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupts(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(agenda.Agenda, "outcome", interrupts)
    monkeypatch.setattr(agenda.Agenda, "end", interrupts)
    model, before = net(), list[torch.Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slowed(clock)(model)

    def train() -> None:
        for x, y in batches(UPDATES):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            before[:] = [p.detach().clone() for p in model.parameters()]
            optimizer.step()

    with engine(techniques=NO_TECHNIQUES | {"fused_optimizer": True}), pytest.raises(KeyboardInterrupt):
        train()
    assert type(optimizer) is torch.optim.SGD
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.detach(), old - 0.1 * p.grad)


def test_a_loader_serves_the_same_batches_from_memory(clock: Clock) -> None:
    def train() -> tuple[list[torch.Tensor], list[type]]:
        model, source, seen, kinds = net(), loader(), list[torch.Tensor](), list[type]()
        slowed(clock)(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(UPDATES // 3):
            epoch = iter(source)
            kinds.append(type(epoch))
            for x, y in epoch:
                seen += [x.clone(), y.clone()]
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return seen, kinds

    expected, _ = train()
    with engine(techniques=NO_TECHNIQUES | {"in_memory": True}):
        found, kinds = train()
    assert issubclass(kinds[0], _BaseDataLoaderIter)
    assert not issubclass(kinds[-1], _BaseDataLoaderIter)
    assert_same(found, expected)
    again, kinds = train()
    assert issubclass(kinds[-1], _BaseDataLoaderIter)
    assert_same(again, expected)


class Shifted(DataLoader[Any]):
    """Loader that changes the batches of its base."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x + 1, y


@pytest.mark.parametrize("change", ["by a class", "of the dataset"])
def test_a_loader_that_changes_its_batches_goes_on_changing_them(change: str, clock: Clock) -> None:
    class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
        shift = 0

        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.full((8,), float(i + self.shift)), i % 3

    def train() -> list[torch.Tensor]:
        model, seen, samples = net(), list[torch.Tensor](), Samples()
        slowed(clock)(model)
        source = (Shifted if change == "by a class" else DataLoader[Any])(samples, batch_size=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(UPDATES // 3):
            if change == "of the dataset":
                samples.shift = epoch // 4
            for x, y in source:
                seen.append(x.clone())
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return seen

    expected = train()
    with engine(techniques=NO_TECHNIQUES | ({"workers": 1} if change == "by a class" else {"in_memory": True})):
        assert_same(train(), expected)


def test_a_new_engine_replaces_the_earlier(clock: Clock) -> None:
    original = DataLoader.__iter__
    fused = NO_TECHNIQUES | {"fused_optimizer": True}
    with engine(techniques=fused) as first, engine(techniques=fused) as second:
        trained = plain(UPDATES, slowed(clock))
        first.undo()  # a second time: the training now belongs to the other engine
        assert not first.tunings
        assert len(second.tunings) == 1
        assert all(isinstance(optimizer, NativeStep) for optimizer in trained.optimizers)
        assert DataLoader.__iter__ is not original
    assert DataLoader.__iter__ is original


@pytest.mark.parametrize("updates", [1, 3, 10, UPDATES])
def test_models_are_freed_at_any_time_of_the_tuning(updates: int, clock: Clock) -> None:
    with engine(techniques=only("fused_optimizer", "compile")) as running:
        trained = plain(updates, slowed(clock))
        model, optimizer = weakref.ref(trained.modules[0]), weakref.ref(trained.optimizers[0])
        del trained
        gc.collect()
        assert model() is None
        assert optimizer() is None
        assert len(ScriptReport.of(running).modules) == (updates >= 10)


def test_an_optimizer_is_freed_while_its_model_is_tuned(clock: Clock) -> None:
    model = net()
    slowed(clock)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine(techniques=NO_TECHNIQUES | {"fused_optimizer": True}):
        train(model, optimizer, UPDATES)
        assert isinstance(optimizer, NativeStep)
        reference = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert reference() is None


def test_a_loader_in_memory_is_freed_with_its_dataset(clock: Clock) -> None:
    model, source = net(), loader()
    slowed(clock)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine(techniques=NO_TECHNIQUES | {"in_memory": True}):
        for _ in range(UPDATES // 3):
            epoch = iter(source)
            for x, y in epoch:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert not isinstance(epoch, _BaseDataLoaderIter)
        assert isinstance(iter(copy.copy(source)), _BaseDataLoaderIter)
        references = weakref.ref(source), weakref.ref(source.dataset)
        del source, epoch, model, optimizer
        gc.collect()
        assert [reference() for reference in references] == [None, None]


def test_a_model_of_a_later_fold_is_tuned_too(clock: Clock) -> None:
    with engine(techniques=NO_TECHNIQUES | {"fused_optimizer": True}) as running:
        folds = [plain(10 * UPDATES, slowed(clock, 0.1)) for _ in range(3)]
        assert [tuning.name for tuning in running.tunings if tuning.spent] == 3 * ["Sequential"]
    del folds


def test_torch_has_its_functions_back() -> None:
    before = nn.Module.__call__, torch.autograd.backward, DataLoader.__iter__, _BaseDataLoaderIter.__next__
    hooks = len(_global_optimizer_post_hooks)
    with engine():
        assert DataLoader.__iter__ is not before[2]
    assert (nn.Module.__call__, torch.autograd.backward, DataLoader.__iter__, _BaseDataLoaderIter.__next__) == before
    assert len(_global_optimizer_post_hooks) == hooks

"""Where the time of a step goes: delays that are put into a phase are found in it, and the phases add up."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout._host import StepCounter
from flatout.mfu import MfuCounter, Phases

STEPS = 8
NAMES = tuple(field.name for field in fields(Phases))


class Delays:
    """Sleeps, and notes how long that really took: a busy machine oversleeps."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def __call__(self, phase: str, seconds: float = 0.01) -> None:
        begun = time.perf_counter()
        time.sleep(seconds)
        self.seconds[phase] += time.perf_counter() - begun


def check(counter: MfuCounter, delays: Delays, wall: float, steps: int = STEPS) -> None:
    """Every delay is in its phase; together the phases are the wall time, to 2 %."""
    phases = counter.total.phases
    assert phases is not None
    assert phases.total * steps == pytest.approx(wall, rel=0.02)
    assert phases.total * steps == pytest.approx(counter.total.seconds, rel=0.02)
    elsewhere = wall - sum(delays.seconds.values())
    for name in NAMES:
        found = getattr(phases, name) * steps
        assert delays.seconds[name] <= found * 1.0001 <= delays.seconds[name] + elsewhere + 0.02 * wall, name


def test_delays_are_found_where_they_were_put() -> None:
    counter, delays = MfuCounter(device="cpu", phases_every=1), Delays()

    def loader() -> Iterator[int]:
        for batch in range(STEPS):
            delays("loader_wait", 0.02)
            yield batch

    begun = wall = time.perf_counter()
    for batch in counter.batches(loader()):
        delays("host_idle")
        with counter.step(samples=4) as step:
            for name, seconds in (("h2d", 0.005), ("forward", 0.015), ("backward", 0.025), ("update", 0.01)):
                with step.phase(name):
                    delays(name, seconds)
                delays("host_idle", 0.002)
        wall = time.perf_counter() - begun
        if batch < STEPS - 1:
            delays("host_idle", 0.003)
    check(counter, delays, wall)
    assert counter.total.stall_fraction == pytest.approx(counter.phases.loader_wait / counter.phases.total, rel=0.02)


class Slow(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._delays("loader_wait", 0.004)
        return torch.ones(8), torch.ones(1)


class SlowModel(nn.Module):
    """Sleeps in its forward and in its backward."""

    def __init__(self, delays: Delays) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.delays = delays

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        self.delays("forward", 0.015)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.delays("backward", 0.02))
        return 2 * output


class SlowSgd(torch.optim.SGD):
    delays: Delays | None = None

    def step(self, closure: Any = None) -> None:
        if self.delays is not None:
            self.delays("update")
        super().step()


def slow_job(delays: Delays) -> tuple[SlowModel, SlowSgd, DataLoader[tuple[Tensor, Tensor]]]:
    model = SlowModel(delays)
    optimizer = SlowSgd(model.parameters(), lr=0.1)
    optimizer.delays = delays
    return model, optimizer, DataLoader(Slow(delays), batch_size=4)


def test_the_phases_of_a_run_are_told_apart() -> None:
    delays = Delays()
    model, optimizer, loader = slow_job(delays)
    run = flatout.optimize(model, loader, optimizer, nn.functional.mse_loss, budget=0)
    run.stats.phases_every = 1
    delays.seconds.clear()
    begun = wall = time.perf_counter()
    for batch in run.loader:
        run.step(batch)
        wall = time.perf_counter() - begun
        if run.stats.steps < STEPS:
            delays("host_idle")
    check(run.stats, delays, wall)


def test_the_phases_of_a_wrapped_model_are_told_apart() -> None:
    delays = Delays()
    model, optimizer, loader = slow_job(delays)
    counter = MfuCounter(flops_per_step=1.0, device="cpu", phases_every=1)
    counter.wrap(model)
    begun = wall = time.perf_counter()
    for step, (x, y) in enumerate(counter.batches(loader)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        wall = time.perf_counter() - begun
        if step < STEPS - 1:
            delays("host_idle")
    check(counter, delays, wall)


def test_phases_are_measured_on_every_nth_step_from_the_second_on() -> None:
    counter = MfuCounter(device="cpu", phases_every=3)
    measured = []
    for _ in range(8):
        with counter.step() as step:
            before = counter.total.phases
            with step.phase("forward"):
                pass
        measured.append(counter.total.phases != before)
    assert measured == [False, True, False, False, True, False, False, True]
    counter.phases_every = 0
    counter.reset()
    with counter.step() as step, step.phase("forward"):
        pass
    assert counter.phases is None


def test_steps_whose_phases_nobody_named_have_none() -> None:
    counter = MfuCounter(device="cpu", phases_every=1)
    for _ in counter.batches(range(3)):
        with counter.step():
            pass
    assert counter.steps == 3
    assert counter.phases is None


def test_an_unknown_phase_is_named() -> None:
    with MfuCounter(device="cpu").step() as step, pytest.raises(ValueError, match="one of loader_wait, h2d, forward"):
        step.phase("sideways")

    with MfuCounter(device="cpu").step() as step, pytest.raises(ValueError, match="got 3"):
        step.phase(3)  # type: ignore[arg-type]
    assert flatout._host.PHASES == NAMES


def test_steps_and_phases_leave_nothing_behind() -> None:
    counter = MfuCounter(device="cpu", phases_every=2)
    with counter.step():
        pass
    objects = counter._core, flatout.mfu.range, flatout._host.Step, flatout._host.Phase
    held = [sys.getrefcount(each) for each in objects]
    for listened in (False, True):
        with torch.autograd.profiler.profile(enabled=listened):
            for _ in counter.batches(range(20)):
                with contextlib.suppress(KeyError), counter.step() as step, step.phase("forward"):
                    with pytest.raises(ValueError, match="phase"):
                        step.phase("sideways")
                    raise KeyError
    del step
    assert [sys.getrefcount(each) for each in objects] == held


def test_a_step_that_has_not_begun_has_no_phases_and_no_end() -> None:
    counter = MfuCounter(device="cpu", phases_every=1)
    step = counter.step()
    with torch.autograd.profiler.profile():
        with pytest.raises(RuntimeError, match="has not begun"):
            step.phase("forward")
        with pytest.raises(RuntimeError, match="has not begun"):
            step.__exit__(None, None, None)
        with step:
            pass
    assert counter.steps == 1
    assert counter.phases is None


def test_who_listens_shows_when_a_step_begins() -> None:
    counter = MfuCounter(device="cpu", phases_every=0)
    step = counter.step()
    shown = []
    for listened in (True, False, True):
        with torch.autograd.profiler.profile(enabled=listened) as profile, step, step.phase("forward"):
            pass
        shown.append(sorted(event.key for event in profile.key_averages()) if listened else None)
    assert shown == [["flatout.forward", "flatout.step"], None, ["flatout.forward", "flatout.step"]]
    assert counter.steps == 3


def test_what_is_not_training_is_in_no_phase() -> None:
    counter = MfuCounter(device="cpu", phases_every=1)
    for pause in (False, True):
        with counter.step() as step, step.phase("forward"):
            pass
        time.sleep(0.05)
        if pause:
            counter.pause()
    with counter.step() as step, step.phase("forward"):
        pass
    assert 0.05 <= counter.total.seconds < 0.1
    assert 0.05 <= counter.phases.host_idle * 3 < 0.1


def test_a_failed_step_takes_its_time_with_it() -> None:
    counter = MfuCounter(device="cpu", phases_every=1)
    with counter.step():
        pass
    with contextlib.suppress(KeyError), counter.step() as step, step.phase("forward"):
        time.sleep(0.05)
        raise KeyError
    with counter.step():
        pass
    assert counter.steps == 2
    assert counter.total.seconds < 0.05


def test_leaving_an_epoch_ends_its_time() -> None:
    counter = MfuCounter(device="cpu")
    for _ in counter.batches(range(5)):
        with counter.step():
            pass
        break
    time.sleep(0.05)
    with counter.step():
        pass
    assert counter.total.seconds < 0.05


def test_threads_share_the_time_and_do_not_mix_up_their_phases() -> None:
    counter = MfuCounter(device="cpu", phases_every=1)

    def train(name: str) -> None:
        for _ in range(5):
            with counter.step(samples=1) as step, step.phase(name):
                time.sleep(0.01)

    threads = [threading.Thread(target=train, args=(name,)) for name in ("forward", "backward")]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - begun
    total = counter.total
    assert total.phases is not None
    assert 0.05 <= total.seconds <= wall  # a moment in which both train counts once
    assert total.phases.total * 10 == pytest.approx(total.seconds)
    assert min(total.phases.forward, total.phases.backward) > 0
    assert total.phases.loader_wait + total.phases.h2d + total.phases.update == 0
    assert total.step_seconds >= 0.01


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=6, max_size=6), min_size=1, max_size=12), st.integers(1, 8))
def test_phases_are_means_over_the_steps_that_have_them(measured: list[list[float]], window: int) -> None:
    counter = MfuCounter(device="cpu", window=window)
    for seconds in measured:
        counter._core.add(1.0, phases=seconds)
    counter._core.add(1.0)  # not measured: does not dilute
    for reading, covered in ((counter.window, [*measured, None][-window:]), (counter.total, measured)):
        covered = [seconds for seconds in covered if seconds is not None]
        assert (reading.phases is None) == (not covered)
        for number, name in enumerate(NAMES):
            if reading.phases is not None:
                mean = sum(seconds[number] for seconds in covered) / len(covered)
                assert getattr(reading.phases, name) == pytest.approx(mean)


def test_phases_say_what_they_are() -> None:
    phases = Phases(0.001, 0.0, 0.003, 0.005, 0.0, 0.001)
    assert phases.total == pytest.approx(0.01)
    told = "loader wait 10.0 % 1 ms, h2d 0.0 % 0 ms, forward 30.0 % 3 ms, backward 50.0 % 5 ms"
    assert str(phases) == f"{told}, update 0.0 % 0 ms, host idle 10.0 % 1 ms"
    core = StepCounter(1)
    core.add(1.0, phases=[1, 2, 3, 4, 5, 6])
    assert Phases(*core.total().phases) == Phases(*range(1, 7))

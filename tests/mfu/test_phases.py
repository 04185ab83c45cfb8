"""Times of steps and phases, in simulated time that the tests advance."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.mfu import MfuCounter, Phases, Reading
from flatout.native._host import StepCounter
from tests.mfu.harness import CallWithSteadyClock, SteadyClock, core_of, process_with_steady_clock

STEPS = 8
NAMES = tuple(field.name for field in fields(Phases))


@pytest.fixture(scope="module")
def with_steady_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallWithSteadyClock]:
    """Call a function of this module in a process whose steady clock only the function advances."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with process_with_steady_clock(tmp_path_factory.mktemp("clock")) as call:
        yield call


def check(total: Reading, **seconds: float) -> None:
    """Check the total seconds of each phase. A phase that is not given takes no time."""
    found = {name: mean * STEPS for name, mean in asdict(total.phases).items()}
    assert found == pytest.approx(dict.fromkeys(NAMES, 0.0) | seconds)
    assert total.seconds == pytest.approx(sum(seconds.values()))
    assert total.stall_fraction == pytest.approx(seconds["loader_wait"] / total.seconds)


def three_batches(clock: SteadyClock) -> tuple[Reading, Reading]:
    counter = MfuCounter(flops_per_step=5.0, peak_flops=10.0, device="cpu")
    for batch in (32, 32, 7):
        clock.advance(0.5)
        counter.waited(0.25)
        with counter.step(samples=batch):
            clock.advance(1.0)
    return counter.window, counter.total


def test_steps_are_timed_by_the_host_clock(with_steady_clock: CallWithSteadyClock) -> None:
    for reading in with_steady_clock(three_batches):
        assert (reading.steps, reading.samples) == (3, 71)
        assert reading.step_seconds == pytest.approx(1.0)
        assert reading.seconds == pytest.approx(0.25 + 3 * 1.0 + 2 * 0.5)  # only the wait before the first step
        assert reading.stall_fraction == pytest.approx(3 * 0.25 / 4.25)
        assert reading.flops_per_second == pytest.approx(15 / 4.25)
        assert reading.mfu == pytest.approx(1.5 / 4.25)


def delayed_loop(clock: SteadyClock) -> Reading:
    counter = MfuCounter(device="cpu", phases_every=1)

    def loader() -> Iterator[int]:
        for batch in range(STEPS):
            clock.advance(0.02)
            yield batch

    with clock.instead_of_perf_counter():
        for _ in counter.batches(loader()):
            clock.advance(0.01)
            with counter.step(samples=4) as step:
                for name, seconds in (("h2d", 0.005), ("forward", 0.015), ("backward", 0.025), ("update", 0.03)):
                    with step.phase(name):
                        clock.advance(seconds)
                    clock.advance(0.002)
            clock.advance(0.003)  # the last one comes after the training
    return counter.total


def test_each_delay_counts_in_its_phase(with_steady_clock: CallWithSteadyClock) -> None:
    idle = STEPS * (0.01 + 4 * 0.002) + (STEPS - 1) * 0.003
    total = with_steady_clock(delayed_loop)
    check(
        total,
        loader_wait=STEPS * 0.02,
        h2d=STEPS * 0.005,
        forward=STEPS * 0.015,
        backward=STEPS * 0.025,
        update=STEPS * 0.03,
        host_idle=idle,
    )
    assert total.step_seconds == pytest.approx(0.005 + 0.015 + 0.025 + 0.03 + 4 * 0.002)


class Slow(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, clock: SteadyClock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._clock.advance(0.004)
        return torch.ones(8), torch.ones(1)


class SlowModel(nn.Module):
    """Model whose forward and backward advance the clock."""

    def __init__(self, clock: SteadyClock) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        self.clock.advance(0.015)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.clock.advance(0.02))
        return 2 * output


class SlowSgd(torch.optim.SGD):
    clock: SteadyClock

    def step(self, closure: Any = None) -> None:
        self.clock.advance(0.01)
        super().step()


def slow_job(clock: SteadyClock) -> tuple[SlowModel, SlowSgd, DataLoader[tuple[Tensor, Tensor]]]:
    model = SlowModel(clock)
    optimizer = SlowSgd(model.parameters(), lr=0.1)
    optimizer.clock = clock
    return model, optimizer, DataLoader(Slow(clock), batch_size=4)


def check_slow_job(total: Reading) -> None:
    check(
        total,
        loader_wait=STEPS * 4 * 0.004,
        forward=STEPS * 0.015,
        backward=STEPS * 0.02,
        update=STEPS * 0.01,
        host_idle=(STEPS - 1) * 0.007,
    )
    assert total.step_seconds == pytest.approx(0.015 + 0.02 + 0.01)


def run_of_slow_job(clock: SteadyClock) -> Reading:
    model, optimizer, loader = slow_job(clock)
    run = flatout.optimize(model, loader, optimizer, nn.functional.mse_loss, budget=0)
    run.stats.phases_every = 1
    with clock.instead_of_perf_counter():
        for batch in run.loader:
            run.step(batch)
            clock.advance(0.007)
    return run.stats.total


def test_phases_of_a_run(with_steady_clock: CallWithSteadyClock) -> None:
    check_slow_job(with_steady_clock(run_of_slow_job))


def loop_of_wrapped_model(clock: SteadyClock) -> Reading:
    model, optimizer, loader = slow_job(clock)
    counter = MfuCounter(flops_per_step=1.0, device="cpu", phases_every=1)
    counter.wrap(model)
    with clock.instead_of_perf_counter():
        for x, y in counter.batches(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            clock.advance(0.007)
    return counter.total


def test_phases_of_a_wrapped_model(with_steady_clock: CallWithSteadyClock) -> None:
    check_slow_job(with_steady_clock(loop_of_wrapped_model))


def every_third_step(clock: SteadyClock) -> Reading:
    counter = MfuCounter(device="cpu", phases_every=3)
    for number in range(8):
        with counter.step() as step, step.phase("forward"):
            clock.advance(2.0**number)
    return counter.total


def test_phases_are_measured_on_every_nth_step_from_the_second_on(with_steady_clock: CallWithSteadyClock) -> None:
    assert with_steady_clock(every_third_step).phases.forward == pytest.approx((2 + 16 + 128) / 3)


def test_phases_that_are_switched_off_are_not_measured() -> None:
    counter = MfuCounter(device="cpu", phases_every=1)
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
    with (
        MfuCounter(device="cpu").step() as step,
        pytest.raises(ValueError, match=r"h2d, forward.*'sideways'"),
    ):
        step.phase("sideways")

    with MfuCounter(device="cpu").step() as step, pytest.raises(ValueError, match=r"h2d, forward.* 3$"):
        step.phase(3)  # type: ignore[arg-type]
    assert flatout.native._host.PHASES == NAMES


def test_steps_and_phases_leave_nothing_behind() -> None:
    counter = MfuCounter(device="cpu", phases_every=2)
    with counter.step():
        pass
    objects = core_of(counter), flatout.mfu.nvtx_range, flatout.native._host.Step, flatout.native._host.Phase
    held = [sys.getrefcount(each) for each in objects]
    for listened in (False, True):
        with torch.autograd.profiler.profile(enabled=listened):
            for _ in counter.batches(range(20)):
                with contextlib.suppress(KeyError), counter.step() as step, step.phase("forward"):
                    with pytest.raises(ValueError, match="sideways"):
                        step.phase("sideways")
                    raise KeyError
    del step
    assert [sys.getrefcount(each) for each in objects] == held


def test_a_step_that_has_not_begun_has_no_phases_and_no_end() -> None:
    counter = MfuCounter(device="cpu", phases_every=1)
    step = counter.step()
    with torch.autograd.profiler.profile():
        with pytest.raises(RuntimeError, match="step"):
            step.phase("forward")
        with pytest.raises(RuntimeError, match="step"):
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


def evaluated(clock: SteadyClock) -> list[Reading]:
    counter, readings = MfuCounter(device="cpu", phases_every=1), []
    for pauses in (False, True, False):
        with counter.step() as step, step.phase("forward"):
            clock.advance(1.0)
        readings.append(counter.total)
        clock.advance(10.0)
        if pauses:
            counter.pause()
    return readings


def test_a_pause_is_in_no_phase(with_steady_clock: CallWithSteadyClock) -> None:
    readings = with_steady_clock(evaluated)
    assert [reading.seconds for reading in readings] == pytest.approx([1, 12, 13])
    assert readings[-1].phases.host_idle * 3 == pytest.approx(10)
    assert readings[-1].phases.total * 3 == pytest.approx(13)


def failed(clock: SteadyClock) -> Reading:
    counter = MfuCounter(device="cpu", phases_every=1)
    for fails in (False, True, False):
        with contextlib.suppress(KeyError), counter.step() as step, step.phase("forward"):
            clock.advance(10.0 if fails else 1.0)
            if fails:
                raise KeyError
        clock.advance(0.1)
    return counter.total


def test_time_of_a_failed_step_does_not_count(with_steady_clock: CallWithSteadyClock) -> None:
    total = with_steady_clock(failed)
    assert total.steps == 2
    assert total.seconds == pytest.approx(2)
    assert total.phases.forward == pytest.approx(1)


def left_early(clock: SteadyClock) -> Reading:
    counter = MfuCounter(device="cpu")
    with clock.instead_of_perf_counter():
        for _ in counter.batches(range(5)):
            with counter.step():
                clock.advance(1.0)
            break
    clock.advance(10.0)
    with counter.step():
        clock.advance(1.0)
    return counter.total


def test_leaving_an_epoch_ends_its_time(with_steady_clock: CallWithSteadyClock) -> None:
    assert with_steady_clock(left_early).seconds == pytest.approx(2)


def overlapping(clock: SteadyClock) -> Reading:
    """Return the reading of two threads' steps, from second 0 to 3 and from second 1 to 7."""
    counter = MfuCounter(device="cpu", phases_every=1)
    begun, may_end = threading.Event(), threading.Event()

    def train() -> None:
        with counter.step(samples=1) as step, step.phase("backward"):
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=train)
    with counter.step(samples=1) as step, step.phase("forward"):
        clock.advance(1.0)
        thread.start()
        begun.wait()
        clock.advance(2.0)
    clock.advance(4.0)
    may_end.set()
    thread.join()
    return counter.total


def test_threads_share_the_time_and_do_not_mix_up_their_phases(with_steady_clock: CallWithSteadyClock) -> None:
    total = with_steady_clock(overlapping)
    assert (total.steps, total.samples) == (2, 2)
    assert total.seconds == pytest.approx(7)  # overlapping time counts once
    assert total.step_seconds == pytest.approx((3 + 6) / 2)
    sums = {name: 2 * mean for name, mean in asdict(total.phases).items()}
    assert sums == pytest.approx(dict.fromkeys(NAMES, 0.0) | {"forward": 3, "backward": 4})


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=6, max_size=6), min_size=1, max_size=12), st.integers(1, 8))
def test_phases_are_means_over_the_steps_that_have_them(measured: list[list[float]], window: int) -> None:
    counter = MfuCounter(device="cpu", window=window)
    for seconds in measured:
        core_of(counter).add(1.0, phases=seconds)
    core_of(counter).add(1.0)  # a step without phases leaves the means unchanged
    for reading, covered in ((counter.window, [*measured, None][-window:]), (counter.total, measured)):
        covered = [seconds for seconds in covered if seconds is not None]
        assert (reading.phases is None) == (not covered)
        for number, name in enumerate(NAMES):
            if reading.phases is not None:
                mean = sum(seconds[number] for seconds in covered) / len(covered)
                assert getattr(reading.phases, name) == pytest.approx(mean)


def test_phases_show_share_and_milliseconds_of_each() -> None:
    phases = Phases(0.001, 0.0, 0.003, 0.005, 0.0, 0.001)
    assert phases.total == pytest.approx(0.01)
    shown = re.findall(r"([a-z\d ]+) ([\d.]+) % ([\d.]+) ms", str(phases))
    assert [name.strip().replace(" ", "_") for name, *_ in shown] == list(NAMES)
    assert [float(share) for _, share, _ in shown] == [10, 0, 30, 50, 0, 10]
    assert [float(milliseconds) for *_, milliseconds in shown] == [1, 0, 3, 5, 0, 1]


def test_phases_have_the_order_of_the_core() -> None:
    core = StepCounter(1)
    core.add(1.0, phases=[1, 2, 3, 4, 5, 6])
    assert Phases(*core.total().phases) == Phases(*range(1, 7))

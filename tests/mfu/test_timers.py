"""The timer over torch's events, for GPUs that the core has no code for, played over events of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout._host import StepCounter
from flatout.mfu.timers import TorchEventTimer


class Event:
    """A moment that is reached when the test says so."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at = clock.now

    def query(self) -> bool:
        return self.at <= self._clock.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1e3 * (end.at - self.at)


class Clock(TorchEventTimer):
    def __init__(self, core: StepCounter) -> None:
        super().__init__(core, torch.device("cuda", 0))
        self.now = 0.0
        self.reached = float("inf")
        self.recording = False

    def _now(self) -> Any:
        assert not self.recording
        return Event(self)

    def _is_recording(self) -> bool:
        return self.recording


def step(timer: Clock, seconds: float = 1.0) -> None:
    token = timer.begin()
    timer.now += seconds
    timer.touch(token)
    timer.finish(token, 1, 0, None, None)


def test_waits_and_pauses_belong_to_the_step_that_begins_next() -> None:
    core = StepCounter(10)
    timer = Clock(core)
    first = timer.begin()
    timer.now = 1.0
    timer.touch(first)
    timer.waited(3.0)
    timer.pause()  # an evaluation; a wrapped model's step is finished only when the next one begins
    timer.now = 9.0
    timer.finish(first, 1, 0, None, None)
    step(timer)
    assert core.total().seconds == pytest.approx(2.0)
    timer.waited(0.5)
    timer.now += 0.5
    step(timer)
    assert core.total().seconds == pytest.approx(3.5)
    assert core.total().stall_fraction == pytest.approx(0.5 / 3.5)


def test_what_is_recorded_into_a_graph_is_no_step() -> None:
    core = StepCounter(10)
    timer = Clock(core)
    step(timer)
    timer.recording = True
    token = timer.begin()
    timer.now += 10.0
    timer.touch(token)
    timer.finish(token, 1, 0, None, None)
    timer.poll()
    timer.recording = False
    step(timer)
    assert (core.total().steps, core.total().seconds) == (2, pytest.approx(2.0))


def test_nothing_is_asked_before_it_is_reached() -> None:
    core = StepCounter(10)
    timer = Clock(core)
    timer.reached = 1.5
    step(timer)
    step(timer)
    assert core.total().steps == 1
    timer.reached = 2.0
    timer.poll()
    assert core.total().steps == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 5)), max_size=40))
def test_no_time_counts_twice(calls: list[tuple[bool, int, int]]) -> None:
    core = StepCounter(10)
    timer = Clock(core)
    tokens: list[Any] = []
    finished = 0
    for begins, which, seconds in calls:
        timer.now += seconds
        if begins or not tokens:
            tokens.append(timer.begin())
        else:
            token = tokens.pop(which % len(tokens))
            timer.touch(token)
            timer.finish(token, 1, 0, None, None)
            finished += 1
    assert core.total().steps == finished
    assert core.total().seconds <= timer.now


def test_time_goes_on_from_the_last_end_and_a_wait_beside_a_step_takes_none() -> None:
    core = StepCounter(10)
    timer = Clock(core)
    short, long = timer.begin(), timer.begin()
    timer.now = 1.0
    timer.touch(short)
    timer.pause()
    timer.waited(2.0)  # another thread's
    timer.now = 3.0
    timer.touch(long)
    timer.finish(long, 1, 0, None, None)  # ends last, is told of first
    timer.finish(short, 1, 0, None, None)
    step(timer)
    assert core.total().seconds == pytest.approx(4.0)

"""Clock of a rank's steps on the host."""

from __future__ import annotations

from unittest import mock

import torch

from flatout.distributed.step_clock import StepClock
from tests.clock import Clock


def test_a_step_is_computing_until_the_own_gradients_and_waiting_from_there():
    now, clock = Clock(tick=0.0), StepClock(torch.device("cpu"))
    with mock.patch("time.perf_counter", now):
        for _ in range(2):
            clock.begin()
            now.advance(3)
            clock.ready()
            now.advance(5)
            clock.ready()  # this bucket does not exist
            clock.end()
            now.advance(100)
        assert clock.take() == [2, 0, 6, 10]
        assert clock.take() == [0, 0, 0, 0]


def test_a_step_without_a_mark_computes_to_its_end():
    now, clock = Clock(tick=0.0), StepClock(torch.device("cpu"))
    with mock.patch("time.perf_counter", now):
        clock.begin()
        now.advance(3)
        clock.end()
        with clock.waiting():
            now.advance(7)
        assert clock.take() == [1, 0, 3, 7]


def test_a_failed_step_counts_for_nothing():
    now, clock = Clock(tick=0.0), StepClock(torch.device("cpu"))
    with mock.patch("time.perf_counter", now):
        clock.begin()
        clock.ready()
        now.advance(3)
        clock.begin()
        now.advance(4)
        clock.end()
        assert clock.take() == [1, 0, 4, 0]


def test_waits_for_batches_are_those_of_the_loader():
    now, clock = Clock(tick=0.0), StepClock(torch.device("cpu"))

    def batches():
        for i in range(3):
            now.advance(2)
            yield i

    with mock.patch("time.perf_counter", now):
        for i, batch in enumerate(clock.loading(batches())):
            assert i == batch
            now.advance(50)
        assert clock.take() == [0, 6, 0, 0]

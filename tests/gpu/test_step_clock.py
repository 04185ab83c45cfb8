"""Clock of a rank's steps on a CUDA device, which gives device times without synchronization."""

from __future__ import annotations

import pytest
import torch

from flatout.distributed.step_clock import StepClock

LONG = 500_000_000
"""Cycles that keep the GPU busy for about a quarter of a second."""


def test_times_are_those_of_the_device() -> None:
    clock, marks = StepClock(torch.device("cuda")), [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    clock.begin()
    marks[0].record()
    torch.cuda._sleep(LONG)
    marks[1].record()
    clock.ready()
    torch.cuda._sleep(LONG // 2)
    clock.ready()  # is not counted
    clock.end()
    marks[2].record()
    assert clock.take() == [0, 0, 0, 0]  # the device is still busy
    torch.cuda.synchronize()
    steps, loading, computing, waiting = clock.take()
    assert (steps, loading) == (1, 0)
    assert computing == pytest.approx(marks[0].elapsed_time(marks[1]) / 1e3, rel=0.1)
    assert waiting == pytest.approx(marks[1].elapsed_time(marks[2]) / 1e3, rel=0.1)
    assert clock.take() == [0, 0, 0, 0]

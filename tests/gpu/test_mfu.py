"""Step times from CUDA events: right within the device's own clock, and without a synchronisation."""

from __future__ import annotations

import time

import pytest
import torch

from flatout.mfu import MfuCounter
from flatout.mfu.timers import TorchEventTimer

MILLISECOND_CYCLES = 1_000_000  # of the device's clock: half a millisecond to a millisecond


@pytest.fixture(params=["core", "torch"])
def counter(request: pytest.FixtureRequest) -> MfuCounter:
    counter = MfuCounter(flops_per_step=1e6, device="cuda")
    if request.param == "torch":
        counter._timer = TorchEventTimer(counter._core, counter.device)
    return counter


def busy(milliseconds: int = 1) -> None:
    torch.cuda._sleep(milliseconds * MILLISECOND_CYCLES)


def test_a_step_takes_what_its_kernels_take(counter: MfuCounter) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        with counter.step(samples=4):
            begin.record()
            busy(20)
            end.record()
    torch.cuda.synchronize()
    assert (counter.steps, counter.samples) == (5, 20)
    assert counter.step_seconds == pytest.approx(begin.elapsed_time(end) * 1e-3, rel=0.1)


def test_nothing_waits_for_the_device(counter: MfuCounter) -> None:
    busy(1)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    with counter.step(samples=1):
        busy(1000)
    seen_at_once = counter.steps
    host_seconds = time.perf_counter() - begun
    torch.cuda.synchronize()
    device_seconds = counter.step_seconds
    assert seen_at_once == 0
    assert device_seconds is not None
    assert host_seconds < device_seconds / 2


@pytest.mark.sanitize
def test_more_steps_in_flight_than_any_ring(counter: MfuCounter) -> None:
    for _ in range(300):
        with counter.step(samples=1):
            torch.ones(8, device="cuda").add_(1)
    torch.cuda.synchronize()
    assert counter.steps == 300


def test_a_wait_behind_a_busy_device_is_no_stall(counter: MfuCounter) -> None:
    for _ in range(4):
        with counter.step(samples=1):
            busy(50)
        counter.waited(0.001)  # while the device still works
    torch.cuda.synchronize()
    assert counter.stall_fraction is not None
    assert counter.stall_fraction < 0.05


def test_side_streams_are_followed(counter: MfuCounter) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            with counter.step(samples=1):
                busy(5)
    stream.synchronize()
    assert counter.steps == 3


def test_a_captured_step_is_not_counted_and_does_not_break_the_capture() -> None:
    counter = MfuCounter(device="cuda")
    x = torch.ones(8, device="cuda")
    with counter.step(samples=1):
        x.add_(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), counter.step(samples=1):
        x.add_(1)
    for _ in range(3):
        with counter.step(samples=1):
            graph.replay()
    torch.cuda.synchronize()
    assert counter.steps == 4
    assert x[0].item() == 4.0

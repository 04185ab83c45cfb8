"""Step times from CUDA events: correct on the device's clock, without synchronization."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

import flatout
from flatout.mfu import MfuCounter
from flatout.mfu.timers import TorchEventTimer
from tests.gpu.trace import traced

MILLISECOND_CYCLES = 1_000_000  # cycles of the device's clock in 0.5 to 1 ms


@pytest.fixture(params=["core", "torch"])
def counter(request: pytest.FixtureRequest) -> MfuCounter:
    counter = MfuCounter(flops_per_step=1e6, device="cuda")
    if request.param == "torch":
        counter._core.use_timer(TorchEventTimer(counter._core, counter.device))
    return counter


def busy(milliseconds: int = 1) -> None:
    torch.cuda._sleep(milliseconds * MILLISECOND_CYCLES)


def test_a_step_takes_what_its_kernels_take(counter: MfuCounter) -> None:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
    for begin, end in events:
        with counter.step(samples=4):
            begin.record()
            busy(20)
            end.record()
    torch.cuda.synchronize()
    assert (counter.steps, counter.samples) == (5, 20)
    seconds = sum(begin.elapsed_time(end) for begin, end in events) * 1e-3 / len(events)
    assert counter.step_seconds == pytest.approx(seconds, rel=0.1)


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
        counter.waited(0.001)  # while the device is busy
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


def train_marked(counter: MfuCounter, steps: int, between: Callable[[], object] = lambda: None) -> None:
    def batches() -> Iterator[int]:
        for batch in range(steps):
            between()
            yield batch

    for _ in counter.batches(batches()):
        with counter.step(samples=1) as step:
            for phase, milliseconds in (("h2d", 2), ("forward", 8), ("backward", 16), ("update", 4)):
                with step.phase(phase):
                    busy(milliseconds)


def test_phases_are_the_devices_own_times() -> None:
    counter = MfuCounter(device="cuda", phases_every=1)
    busy(1000)  # the host queues all steps during this time, so the device never waits for a slow host
    train_marked(counter, 10)
    torch.cuda.synchronize()
    phases = counter.total.phases
    assert phases is not None
    assert phases.total * 10 == pytest.approx(counter.total.seconds, rel=0.02)
    for phase, share in (("h2d", 2), ("forward", 8), ("backward", 16), ("update", 4)):
        assert getattr(phases, phase) / phases.total == pytest.approx(share / 30, abs=0.03), phase
    assert phases.loader_wait + phases.host_idle < 0.05 * phases.total


def test_a_device_without_work_waits_for_the_loader() -> None:
    counter = MfuCounter(device="cuda", phases_every=1)

    def slow() -> None:
        torch.cuda.synchronize()
        time.sleep(0.05)

    train_marked(counter, 6, slow)
    torch.cuda.synchronize()
    phases = counter.total.phases
    assert phases is not None
    assert phases.loader_wait > 0.045
    assert counter.total.stall_fraction == pytest.approx(phases.loader_wait / phases.total, abs=0.05)


def test_a_device_that_waits_for_python_is_told_from_one_that_waits_for_data() -> None:
    counter = MfuCounter(device="cuda", phases_every=1)
    for _ in counter.batches(range(6)):
        with counter.step() as step, step.phase("forward"):
            busy(5)
        torch.cuda.synchronize()  # loss.item()
        time.sleep(0.03)
    phases = counter.total.phases
    assert phases is not None
    assert phases.host_idle * 6 > 5 * 0.025
    assert phases.loader_wait < 0.01


@pytest.mark.sanitize
@pytest.mark.parametrize("phases_every", [1, 10])
def test_phases_of_a_captured_step_do_not_break_the_capture(phases_every: int) -> None:
    counter = MfuCounter(device="cuda", phases_every=phases_every)
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with counter.step() as step, step.phase("forward"):
        x.add_(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), counter.step() as step, step.phase("forward"):
        x.add_(1)
    for _ in range(4):
        with counter.step() as step, step.phase("forward"):
            graph.replay()
    torch.cuda.synchronize()
    assert counter.steps == 5
    assert counter.phases is not None
    assert x[0].item() == 5.0


def test_counting_never_synchronises() -> None:
    counter = MfuCounter(flops_per_step=1e9, device="cuda", phases_every=1)
    x = torch.ones(1 << 20, device="cuda")

    def steps() -> None:
        for _ in counter.batches(range(20)):
            with counter.step(samples=1) as step:
                with step.phase("forward"):
                    x.mul_(1.0)
                with step.phase("update"):
                    x.add_(0.0)
            assert counter.window is not None

    steps()  # creates the events
    assert traced(steps).waits == []


def test_a_wrapped_model_is_timed_on_the_device() -> None:
    counter = MfuCounter(device="cuda", phases_every=1)
    model = counter.wrap(torch.nn.Linear(1024, 1024).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(10):
            model(torch.ones(512, 1024, device="cuda")).square().mean().backward()  # hooks run on autograd's thread
            optimizer.step()
            optimizer.zero_grad()

    steps()
    assert traced(steps).waits == []
    torch.cuda.synchronize()
    assert counter.steps == 20
    phases = counter.total.phases
    assert phases is not None
    assert min(phases.forward, phases.backward, phases.update) > 0
    assert counter.total.flops_per_second * counter.total.seconds == pytest.approx(20 * 4 * 512 * 1024 * 1024)


def test_a_run_on_the_device_tells_its_phases_and_passes_judgement() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 16))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 512), torch.randint(0, 16, (4096,)))
    loader = torch.utils.data.DataLoader(data, batch_size=256)
    optimizer = torch.optim.AdamW(model.parameters())
    run = flatout.optimize(model, loader, optimizer, torch.nn.functional.cross_entropy, budget=0)
    run.stats.phases_every = 1
    run.fit(3, progress=False)
    torch.cuda.synchronize()
    phases = run.stats.phases
    assert phases is not None
    assert min(phases.forward, phases.backward, phases.update) > 0
    assert run.verdict.limit

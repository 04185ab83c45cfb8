"""Timer over torch's events on a simulated GPU. The timer serves GPUs that the native core does not support."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.mfu.timers import TorchEventTimer
from flatout.native._host import StepCounter, StepTimer
from tests.mfu.harness import SimulatedGpu


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    gpu = SimulatedGpu()
    with gpu.patched_into_torch():
        yield gpu


def timed() -> tuple[StepCounter, TorchEventTimer]:
    core = StepCounter(10)
    return core, TorchEventTimer(core, torch.device("cuda", 0))


def step(gpu: SimulatedGpu, timer: TorchEventTimer) -> None:
    """Take a step of one second."""
    token = timer.begin()
    gpu.now += 1.0
    timer.touch(token)
    timer.finish(token, 1, 0, None, None)


def test_waits_and_pauses_belong_to_the_step_that_begins_next(gpu: SimulatedGpu) -> None:
    core, timer = timed()
    first = timer.begin()
    gpu.now = 1.0
    timer.touch(first)
    timer.waited(3.0)
    timer.pause()  # an evaluation, before a wrapped model finishes its last step
    gpu.now = 9.0
    timer.finish(first, 1, 0, None, None)
    step(gpu, timer)
    assert core.total().seconds == pytest.approx(2.0)
    timer.waited(0.5)
    gpu.now += 0.5
    step(gpu, timer)
    assert core.total().seconds == pytest.approx(3.5)
    assert core.total().stall_fraction == pytest.approx(0.5 / 3.5)
    gpu.now += 1.0  # code of the loop
    step(gpu, timer)
    assert core.total().stall_fraction == pytest.approx(0.5 / 5.5)  # a wait counts once


def test_work_recorded_into_a_graph_is_no_step(gpu: SimulatedGpu) -> None:
    core, timer = timed()
    step(gpu, timer)
    gpu.recording = True
    token = timer.begin()
    gpu.now += 10.0
    timer.touch(token)
    timer.finish(token, 1, 0, None, None)
    timer.poll()
    gpu.recording = False
    step(gpu, timer)
    assert (core.total().steps, core.total().seconds) == (2, pytest.approx(2.0))


def test_a_step_counts_after_the_gpu_has_finished_it(gpu: SimulatedGpu) -> None:
    core, timer = timed()
    gpu.reached = 1.5
    step(gpu, timer)
    step(gpu, timer)
    assert core.total().steps == 1
    gpu.reached = 2.0
    timer.poll()
    assert core.total().steps == 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 5)), max_size=40))
def test_no_time_counts_twice(calls: list[tuple[bool, int, int]]) -> None:
    gpu = SimulatedGpu()
    core, timer = timed()
    tokens: list[int] = []
    finished = 0
    with gpu.patched_into_torch():
        for begins, which, seconds in calls:
            gpu.now += seconds
            if begins or not tokens:
                tokens.append(timer.begin())
            else:
                token = tokens.pop(which % len(tokens))
                timer.touch(token)
                timer.finish(token, 1, 0, None, None)
                finished += 1
        assert core.total().steps == finished
        assert core.total().seconds <= gpu.now


def test_overlapping_steps_and_a_wait_during_a_step_count_once(gpu: SimulatedGpu) -> None:
    core, timer = timed()
    short, long = timer.begin(), timer.begin()
    gpu.now = 1.0
    timer.touch(short)
    timer.pause()
    timer.waited(2.0)  # in another thread
    gpu.now = 3.0
    timer.touch(long)
    timer.finish(long, 1, 0, None, None)  # ends last, is finished first
    timer.finish(short, 1, 0, None, None)
    step(gpu, timer)
    assert core.total().seconds == pytest.approx(4.0)


def test_a_step_finished_during_a_poll_counts_once(gpu: SimulatedGpu) -> None:
    core, timer = timed()
    first, second = timer.begin(), timer.begin()
    late = [second]

    def collect() -> None:
        """Finish a step during the query of an event, as the collection of a wrapped model does."""
        if late:
            timer.finish(late.pop(), 10, 0, None, None)

    gpu.asked = collect
    gpu.now = 1.0
    timer.touch(first)
    timer.touch(second)
    timer.finish(first, 1, 0, None, None)
    assert (core.total().steps, core.total().samples, core.total().seconds) == (2, 11, pytest.approx(1.0))


def test_a_counter_takes_steps_from_a_python_timer(gpu: SimulatedGpu) -> None:
    core = StepCounter(10)
    core.use_timer(TorchEventTimer(core, torch.device("cuda", 0)))  # the counter holds the only reference
    gc.collect()
    with core.step(3, 4, 5.0):
        pass
    with pytest.raises(KeyError), core.step(3, 4, None):
        raise KeyError
    assert (core.total().steps, core.total().samples, core.total().tokens) == (1, 3, 4)
    with pytest.raises(TypeError):
        core.use_timer(None)  # type: ignore[arg-type]


def test_errors_of_a_timer_reach_the_loop() -> None:
    class Broken(StepTimer):
        def touch(self, token: int) -> None:
            raise KeyboardInterrupt

        def waited(self, seconds: float) -> str:
            raise ValueError(seconds)

    core = StepCounter(10)
    core.use_timer(Broken())
    with pytest.raises(AttributeError, match="begin"), core.step(0, 0, None):
        pass
    with pytest.raises(KeyboardInterrupt):
        core.touch(1)
    with pytest.raises(ValueError, match="2"):
        core.waited(2.0)


@pytest.mark.slow
def test_daemon_threads_may_be_within_a_timer_when_python_ends() -> None:
    program = """
        import threading, time
        from flatout.native._host import StepCounter, StepTimer

        class Slow(StepTimer):
            def begin(self):
                time.sleep(0.001)
                return 1
            def touch(self, token):
                time.sleep(0.001)
            def finish(self, *work):
                begun.set()

        def train():
            while True:
                with core.step(1, 1, None):
                    pass

        core, begun = StepCounter(1), threading.Event()
        core.use_timer(Slow())
        for _ in range(2):
            threading.Thread(target=train, daemon=True).start()
        begun.wait(600)
    """
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

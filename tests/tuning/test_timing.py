"""Timing of blocks of updates."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from flatout.tuning import stopwatch
from flatout.tuning.stopwatch import seconds, timed_block
from tests.clock import TICK, Clock

CPU = torch.device("cpu")


def test_a_block_has_the_wall_time_of_each_update(clock: Clock) -> None:
    order: list[int] = []

    def update(i: int) -> None:
        order.append(i)
        clock.advance(0.1 * i)

    block = timed_block(update, range(3, 6), CPU)
    assert order == [3, 4, 5]
    assert block.wall == pytest.approx([0.3 + TICK, 0.4 + TICK, 0.5 + TICK])
    assert block.mean == pytest.approx(0.4 + TICK)


def test_the_seconds_of_work_are_those_of_the_clock(clock: Clock) -> None:
    assert seconds(lambda: clock.advance(2.0), CPU) == pytest.approx(2.0 + TICK)


def test_the_seconds_of_work_on_a_gpu_include_what_the_work_queued_and_nothing_that_was_queued_before(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = [5.0]

    def synchronize(_: torch.device) -> None:
        clock.advance(sum(queue))
        queue.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert seconds(lambda: queue.append(2.0), torch.device("cuda", 0)) == pytest.approx(2.0 + TICK)


def test_cpu_time_is_the_mean_over_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = 5.0

    def update(i: int) -> None:
        nonlocal spent
        spent += i

    monkeypatch.setattr(time, "process_time", lambda: spent)
    assert timed_block(update, range(1, 4), CPU).cpu == pytest.approx(2.0)


def test_sleep_takes_no_cpu_time() -> None:
    block = timed_block(lambda _: time.sleep(0.02), range(2), CPU)
    assert min(block.wall) >= 0.02
    assert block.cpu < 0.02


@pytest.mark.skipif(stopwatch._sleeps() is None, reason="needs a system that counts context switches: Linux")
def test_sleep_and_locks_count_as_waits_and_computing_does_not() -> None:
    assert timed_block(lambda _: time.sleep(0.001), range(5), CPU).sleeps == pytest.approx(5, abs=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = timed_block(lambda _: pool.submit(Event().wait, 0.001).result(), range(5), CPU)
    assert waiting.sleeps is not None
    assert waiting.sleeps >= 5
    blocks = [timed_block(lambda _: sum(range(100)), range(5), CPU) for _ in range(5)]
    assert min(block.sleeps or 0 for block in blocks) == 0


def test_waits_are_unknown_where_the_system_does_not_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "resource", None)
    assert timed_block(lambda _: None, range(1), CPU).sleeps is None


def test_an_error_of_an_update_passes() -> None:
    with pytest.raises(ZeroDivisionError):
        timed_block(lambda i: 1 / i, range(2), CPU)

"""Alternating loops over two loaders, whose worker processes are modeled on a simulated clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flatout.tuning import stopwatch
from flatout.tuning.progress import Progress
from flatout.tuning.stopwatch import Measure, Stopwatch, in_turns
from tests.clock import Clock, TimedStep
from tests.jobs import job_of, make_job

Batch = tuple[Tensor, Tensor]
BATCH = torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64)


class ModelledWorkers:
    """Loader whose workers each make a batch in ``seconds``, and together prefetch ``queue`` batches.

    A worker starts its next batch when the training takes one, like those of a DataLoader.
    """

    def __init__(self, clock: Clock, seconds: float, workers: int, queue: int) -> None:
        self.clock, self.seconds, self.workers, self.queue = clock, seconds, workers, queue

    def __iter__(self) -> Iterator[Batch]:
        free, ready = deque([0.0] * self.workers), deque[float]()

        def start() -> None:
            free.append(max(free.popleft(), self.clock.now) + self.seconds)
            ready.append(free[-1])

        for _ in range(self.queue):
            start()
        while True:
            self.clock.sleep(max(0.0, ready.popleft() - self.clock.now))
            start()
            yield BATCH


class Alone(ModelledWorkers):
    """Loader that makes a batch in this process on request."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(clock, seconds, workers=0, queue=0)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.clock.sleep(self.seconds)
            yield BATCH


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let timers see the queue of modeled workers."""
    monkeypatch.setattr(
        stopwatch, "workers_and_queue", lambda _, loader: (max(1, loader.workers), getattr(loader, "queue", 0))
    )


def timer_of(clock: Clock, loader: ModelledWorkers, step: float) -> Stopwatch:
    model, _, opt = make_job()
    return Stopwatch(job_of(model, [], opt, loader=loader, loss_fn=TimedStep(clock, step)), loader)


@pytest.mark.parametrize("busy", [1.0, 0.0])
@pytest.mark.parametrize(
    ("workers", "queue", "seconds", "step"),
    [
        (2, 8, 1.0, 0.25),  # half as fast as the step
        (2, 8, 1.0, 0.45),  # nearly as fast as the step: a full queue lasts for 80 steps
        (2, 8, 1.0, 0.6),
        (6, 12, 0.5, 0.1),
        (6, 12, 1.2, 0.1),  # rounds of six batches
        (3, 6, 0.9, 0.1),
        (8, 16, 0.05, 1.0),
    ],
)
def test_a_stretch_has_the_rate_of_a_long_training(
    modelled: None, clock: Clock, workers: int, queue: int, seconds: float, step: float, busy: float
) -> None:
    old = timer_of(clock, Alone(clock, seconds), step)
    new = timer_of(clock, ModelledWorkers(clock, seconds, workers, queue), step)
    with in_turns(old, new, Progress(), steps=4, limit=math.inf, settle=1, busy=busy) as (first, second):
        for i, measure in enumerate([first, second, second, first, second, first, first]):
            expected = seconds + step if measure == first else max(step, seconds / workers)
            assert measure(i).mean == pytest.approx(expected, rel=0.03)


def test_a_loop_rests_until_the_others_queue_is_full_and_only_after_the_other(modelled: None, clock: Clock) -> None:
    old = timer_of(clock, Alone(clock, 1.0), 0.1)
    new = timer_of(clock, ModelledWorkers(clock, 1.0, 6, 12), 0.1)

    def seconds(measure: Measure) -> float:
        begun = clock.now
        measure(0)
        return clock.now - begun

    with in_turns(old, new, Progress(), steps=1, limit=math.inf, settle=0, busy=0.0) as (first, second):
        assert seconds(first) == pytest.approx(1.1, rel=0.02)
        assert seconds(second) == pytest.approx(1.1 + 1.0, rel=0.02)  # the first batch, and a round of six
        assert new.refill_seconds == pytest.approx(2.0, rel=0.02)  # six workers make twelve batches in two rounds
        assert seconds(first) == pytest.approx(2.0 + 1.1, rel=0.02)
        assert seconds(first) == pytest.approx(1.1, rel=0.02)


def test_an_early_block_can_be_discarded(modelled: None, clock: Clock) -> None:
    timer = timer_of(clock, Alone(clock, 1.0), 0.1)
    timer.block(1)
    timer.blocks.clear()
    clock.slow_down(timer._job.spec.model, 0.5)
    timer.block(2)
    assert timer.pace.total_ms == pytest.approx(1600, rel=0.01)
    timer.close()


def test_the_share_of_a_core_tells_waiting_from_computing(modelled: None, clock: Clock) -> None:
    class Computing(Alone):
        def __iter__(self) -> Iterator[Batch]:
            while True:
                self.clock.advance(self.seconds)
                yield BATCH

    busy = []
    for loader in (Alone(clock, 1.0), Computing(clock, 1.0)):
        timer = timer_of(clock, loader, 2.0)
        timer.block(2)
        busy.append(timer.busy)
        assert timer.pace.cpu_ms == pytest.approx(2000, rel=0.01)
        timer.close()
    assert busy == pytest.approx([0.0, 1.0], abs=0.01)

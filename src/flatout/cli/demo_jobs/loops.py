"""Two trainings of a job that take turns: a plain loop, and a loop through ``flatout.optimize``.

The speed of a machine drifts while other programs run, by half and more within a minute. Two trainings one after the
other would show the drift. Turns of one second expose both trainings to the same drift.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flatout
from flatout.cli.demo_jobs.demo_job import LONG_TRAINING, DemoJob, Sample
from flatout.core.random_state import RandomState

Tick = Callable[[int, float | None, float], None]
"""Function to call after every step, with the step's samples, the loss if the host has it, and the seconds so far."""

TURN_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """Result of one training.

    Attributes:
        seconds: duration of the training loop, with data loading, without evaluation and tuning.
        samples_per_second: samples trained on, divided by ``seconds``.
        metrics: held-out ``"loss"`` and the job's own metrics, by name.
    """

    seconds: float
    samples_per_second: float
    metrics: dict[str, float]


def make_loader(job: DemoJob) -> DataLoader[Sample]:
    """Return a plain loader, without workers or pinned memory."""
    return DataLoader(job.train, batch_size=job.training.batch_size, shuffle=True)


def make_model(job: DemoJob) -> nn.Module:
    """Seed torch, and return a model. Its initial weights are the same in every call."""
    torch.manual_seed(job.training.seed)
    return job.build_model()


class Lane(ABC):
    """Training of a job that runs in turns, with a separate random state.

    Attributes:
        seconds: duration of the training loop so far, with data loading, without evaluation and tuning.
        steps: the steps that are left. Each yields its samples, and the loss if the host has it.
    """

    def __init__(self, job: DemoJob, device: torch.device, epochs: int, tick: Tick) -> None:
        self.seconds = 0.0
        self._job = job
        self._device = device
        self._epochs = epochs
        self._tick = tick
        self.steps = self._train()
        self._random = RandomState.capture()

    @abstractmethod
    def _train(self) -> Iterator[tuple[int, float | None]]:
        """Train step by step. Yield the samples of each step, and the loss if the host has it, else None."""

    @abstractmethod
    def _metrics(self) -> dict[str, float]:
        """Return the held-out ``"loss"`` and the job's own metrics."""

    def turn(self, seconds: float = math.inf) -> bool:
        """Train for about ``seconds``. Return False if the training is complete."""
        self._random.restore()
        start, more = time.perf_counter(), False
        for samples, loss in self.steps:
            elapsed = time.perf_counter() - start
            self._tick(samples, loss, self.seconds + elapsed)
            if elapsed >= seconds:
                more = True
                break
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += time.perf_counter() - start
        self._random = RandomState.capture()
        return more

    def outcome(self) -> Outcome:
        """Return the result of the whole training."""
        samples = self._epochs * len(self._job.train)  # type: ignore[arg-type]
        return Outcome(self.seconds, samples / self.seconds, self._metrics())


def take_turns(lanes: Sequence[Lane]) -> None:
    """Train every lane to its end, in turns of ``TURN_SECONDS``."""
    running = list(lanes)
    while running:
        running = [lane for lane in running if lane.turn(TURN_SECONDS)]


class Naive(Lane):
    """Plain loop, as in tutorials. No part is slowed down on purpose."""

    def __init__(self, job: DemoJob, device: torch.device, epochs: int, tick: Tick) -> None:
        self._model = make_model(job).to(device)
        self._loader = make_loader(job)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=job.training.lr)
        super().__init__(job, device, epochs, tick)

    def _train(self) -> Iterator[tuple[int, float | None]]:
        for _ in range(self._epochs):
            self._model.train()
            for inputs, targets in self._loader:
                inputs, targets = inputs.to(self._device), targets.to(self._device)
                self._optimizer.zero_grad()
                loss = self._job.loss_fn(self._model(inputs), targets)
                loss.backward()
                self._optimizer.step()
                yield len(inputs), loss.item()

    def _metrics(self) -> dict[str, float]:
        return evaluate(self._job, self._model, self._device)


class Optimized(Lane):
    """Training of the same model on the same data through ``flatout.optimize``. The loop does not wait for the device.

    Args:
        job: job to train.
        device: device of the training.
        epochs: passes over the training data.
        tick: function to call after every step, without a loss.
        budget: seconds that measurements may take.

    Attributes:
        report: report of ``flatout.optimize``.
        tuning_seconds: duration of the call of ``flatout.optimize``.
    """

    def __init__(self, job: DemoJob, device: torch.device, epochs: int, tick: Tick, budget: float) -> None:
        model = make_model(job).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.training.lr)
        start = time.perf_counter()
        self._run = flatout.optimize(
            model,
            make_loader(job),
            optimizer=optimizer,
            loss_fn=job.loss_fn,
            device=device,
            expected_steps=LONG_TRAINING,
            budget=budget,
            plan=None,  # the demo shows trials, which a cached plan would replace
        )
        self.tuning_seconds = time.perf_counter() - start
        self.report = self._run.report
        super().__init__(job, device, epochs, tick)

    def _train(self) -> Iterator[tuple[int, float | None]]:
        for _ in range(self._epochs):
            for batch in self._run.loader:
                self._run.step(batch)
                yield len(batch[0]), None

    def _metrics(self) -> dict[str, float]:
        metrics = {name: _on_batch(measure) for name, measure in self._job.metrics.items()}
        held_out = DataLoader(self._job.held_out, batch_size=self._job.training.batch_size)
        return self._run.evaluate(held_out, metrics=metrics)


@torch.no_grad()
def evaluate(job: DemoJob, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Return the means of ``"loss"`` and of the job's metrics over the held-out samples."""
    model.eval()
    measures = {"loss": job.loss_fn, **job.metrics}
    sums = dict.fromkeys(measures, 0.0)
    for inputs, targets in DataLoader(job.held_out, batch_size=job.training.batch_size):
        inputs, targets = inputs.to(device), targets.to(device)
        outputs = model(inputs)
        for name, measure in measures.items():
            sums[name] += measure(outputs, targets).item() * len(inputs)
    return {name: total / len(job.held_out) for name, total in sums.items()}  # type: ignore[arg-type]


def _on_batch(measure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Sample], Tensor]:
    return lambda outputs, batch: measure(outputs, batch[1])

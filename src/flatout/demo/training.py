"""The two trainings of a job: as people first write it, and through ``flatout.optimize``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flatout
from flatout.demo.job import LONG_TRAINING, Job, Sample
from flatout.report import Report

Tick = Callable[[int, float | None], None]
"""Told after every step: samples just trained on, and the loss where the host has it."""


@dataclass(frozen=True)
class Outcome:
    """What one training gave.

    Attributes:
        seconds: the training loop alone, data loading included; evaluation and tuning are not in it.
        samples_per_second: samples trained on / seconds.
        metrics: held-out ``"loss"`` and the job's own metrics.
    """

    seconds: float
    samples_per_second: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Optimized:
    """An ``Outcome`` with what led to it.

    Attributes:
        outcome: of the optimized training.
        tuning_seconds: the call of ``optimize``, from start to return.
        report: what was tried, kept and undone.
    """

    outcome: Outcome
    tuning_seconds: float
    report: Report


def make_loader(job: Job) -> DataLoader[Sample]:
    """The loader that people write first."""
    return DataLoader(job.train, batch_size=job.training.batch_size, shuffle=True)


def make_model(job: Job) -> nn.Module:
    """A model whose initial weights are the same on every call; seeds torch for what follows."""
    torch.manual_seed(job.training.seed)
    return job.build_model()


def naive(job: Job, device: torch.device, epochs: int, tick: Tick) -> Outcome:
    """Trains as people first write it.

    Args:
        job: what to train.
        device: where.
        epochs: passes over the training data.
        tick: told after every step.
    """
    model = make_model(job).to(device)
    loader = make_loader(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.training.lr)

    start = time.perf_counter()
    for _ in range(epochs):
        naive_epoch(job, model, loader, optimizer, device, tick)
    seconds = _elapsed(start, device)
    return Outcome(seconds, epochs * len(job.train) / seconds, evaluate(job, model, device))  # type: ignore[arg-type]


def naive_epoch(
    job: Job,
    model: nn.Module,
    loader: DataLoader[Sample],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    tick: Tick,
) -> None:
    """One pass over the training data: the loop of the tutorials, nothing in it is slowed down on purpose."""
    model.train()
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = job.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        tick(len(inputs), loss.item())


@torch.no_grad()
def evaluate(job: Job, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Means over the held-out samples: ``"loss"`` and the job's metrics."""
    model.eval()
    measures = {"loss": job.loss_fn, **job.metrics}
    sums = dict.fromkeys(measures, 0.0)
    for inputs, targets in DataLoader(job.held_out, batch_size=job.training.batch_size):
        inputs, targets = inputs.to(device), targets.to(device)
        outputs = model(inputs)
        for name, measure in measures.items():
            sums[name] += measure(outputs, targets).item() * len(inputs)
    return {name: total / len(job.held_out) for name, total in sums.items()}  # type: ignore[arg-type]


def optimized(job: Job, device: torch.device, epochs: int, budget: float, tick: Tick) -> Optimized:
    """Trains the same model on the same data through ``flatout.optimize``.

    Args:
        job: what to train.
        device: where.
        epochs: passes over the training data.
        budget: seconds that measuring may take.
        tick: told after every step, without a loss: nothing in the loop waits for the device.
    """
    run, tuning_seconds = optimize(job, device, budget)
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in run.loader:
            run.step(batch)
            tick(len(batch[0]), None)
    seconds = _elapsed(start, device)

    metrics = {name: _on_batch(measure) for name, measure in job.metrics.items()}
    held_out = DataLoader(job.held_out, batch_size=job.training.batch_size)
    measured = {name: float(value) for name, value in run.evaluate(held_out, metrics=metrics).items()}
    outcome = Outcome(seconds, epochs * len(job.train) / seconds, measured)  # type: ignore[arg-type]
    return Optimized(outcome, tuning_seconds, run.report)


def optimize(job: Job, device: torch.device, budget: float) -> tuple[Any, float]:
    """Hands the job's naive parts to ``flatout.optimize``.

    Returns:
        The ``Run``, and the seconds it took to get it.
    """
    model = make_model(job).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.training.lr)
    start = time.perf_counter()
    run = flatout.optimize(
        model,
        make_loader(job),
        optimizer=optimizer,
        loss_fn=job.loss_fn,
        device=device,
        expected_steps=LONG_TRAINING,
        budget=budget,
    )
    return run, _elapsed(start, device)


def _on_batch(measure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Sample], Tensor]:
    return lambda outputs, batch: measure(outputs, batch[1])


def _elapsed(start: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

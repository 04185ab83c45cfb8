"""Loops of benchmarks/optimize.py: a naive loop, an expert's loop, and loops of three libraries.

Each loop is a generator that trains a step and yields its number of samples. All loops of a job have the same model,
data, batch size and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.training_jobs import JOBS, Job
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flatout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LONG = 100_000
"""Expected number of steps of a long training, in which compilation may pay."""


@dataclass(frozen=True)
class Flags:
    """Flags that an expert chooses by hand, also for other libraries."""

    bf16: bool = False
    compile: bool = False
    channels_last: bool = False
    plain_attention: bool = False

    def __str__(self) -> str:
        return " + ".join(name for name, on in vars(self).items() if on) or "eager fp32"


def made(job: Job) -> nn.Module:
    """Return the job's model on the device, with the same weights in each call."""
    torch.manual_seed(0)
    return job.model().to(DEVICE)


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch."""
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch[0])


def moved(batch: Any) -> Any:
    """Return the batch on the device."""
    if isinstance(batch, dict):
        return {key: value.to(DEVICE) for key, value in batch.items()}
    return [part.to(DEVICE) for part in batch]


def naive(job: Job) -> Iterator[int]:
    """Train with the default loader and the default optimizer, and read the loss in every step."""
    model = made(job)
    optimizer = job.optimizer(model.parameters(), lr=job.lr)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, shuffle=True)
    yield from naive_steps(job, model, optimizer, loader)


def naive_steps(job: Any, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> Iterator[int]:
    """Train in float32 without an end, and read the loss in every step. Yield the samples of each step."""
    total = 0.0
    while True:
        for batch in loader:
            batch = moved(batch)
            optimizer.zero_grad()
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.item()
            yield size_of(batch)


def expert(job: Job, flags: Flags) -> Iterator[int]:
    """Train by hand in plain torch, with data on the device and a fused optimizer, and without reading the loss.

    Batches are drawn by index. Two workers make batches of samples that draw random numbers. Model and loss are
    compiled as one.
    """
    step = expert_step(job, flags, *model_and_optimizer(job, flags))
    loader = _loader(job, 2)
    while job.draws:
        for batch in loader:
            step(moved(batch))
            yield size_of(batch)
    columns = _columns(job)
    count = len(next(iter(columns.values())))
    while True:
        order = torch.randperm(count, device=DEVICE)
        for start in range(0, count, job.batch_size):
            index = order[start : start + job.batch_size]
            drawn = {key: column.index_select(0, index) for key, column in columns.items()}
            batch = drawn if job.loss_fn is None else list(drawn.values())
            step(batch)
            yield len(index)


def expert_step(job: Job, flags: Flags, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    """Return the step of the expert's loop. The step takes a batch that is already on the device."""

    def compute(batch: Any) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=flags.bf16):
            return job.loss(model, batch)

    if flags.compile:
        compute = torch.compile(compute)

    def step(batch: Any) -> None:
        compute(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _columns(job: Job) -> dict[Any, Tensor]:
    """Return all samples, read once and stacked, on the device."""
    samples = [job.dataset[i] for i in range(len(job.dataset))]  # type: ignore[arg-type]
    keys = samples[0].keys() if isinstance(samples[0], dict) else range(len(samples[0]))
    return {key: torch.stack([sample[key] for sample in samples]).to(DEVICE) for key in keys}


def fabric(job: Job, flags: Flags, workers: int) -> Iterator[int]:
    """Train with Lightning Fabric, with the recommended flags that helped the expert."""
    from lightning.fabric import Fabric

    engine = Fabric(accelerator=DEVICE.type, devices=1, precision="bf16-mixed" if flags.bf16 else "32-true")
    model, optimizer = model_and_optimizer(job, flags)
    wrapped, wrapped_optimizer = engine.setup(torch.compile(model) if flags.compile else model, optimizer)
    loader = engine.setup_dataloaders(_loader(job, workers))
    yield from _steps(job, engine, wrapped, wrapped_optimizer, loader)


def accelerated(job: Job, flags: Flags, workers: int) -> Iterator[int]:
    """Train with Hugging Face accelerate, with the recommended flags that helped the expert."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # the settings belong to the process, and jobs differ
    engine = Accelerator(
        mixed_precision="bf16" if flags.bf16 else "no",
        cpu=DEVICE.type == "cpu",
        dynamo_backend="inductor" if flags.compile else "no",
    )
    model, optimizer = model_and_optimizer(job, flags)
    wrapped, wrapped_optimizer, loader = engine.prepare(model, optimizer, _loader(job, workers))
    yield from _steps(job, engine, wrapped, wrapped_optimizer, loader)


def _steps(job: Job, engine: Any, model: Any, optimizer: Any, loader: Any) -> Iterator[int]:
    """Train with the step that both libraries recommend."""
    while True:
        for batch in loader:
            engine.backward(job.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield size_of(batch)


def model_and_optimizer(job: Job, flags: Flags) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the job's model according to the flags, and torch's fused optimizer."""
    torch.compiler.config.cache_key_tag = str(flags)  # caches on disk do not distinguish attention kernels
    if flags.plain_attention:
        torch.backends.cuda.enable_flash_sdp(False)
    model = made(job)
    if flags.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model, job.optimizer(model.parameters(), lr=job.lr, fused=True)


def _loader(job: Job, workers: int) -> DataLoader[Any]:
    settings = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4} if workers else {}
    return DataLoader(
        job.dataset, batch_size=job.batch_size, shuffle=True, pin_memory=DEVICE.type == "cuda", **settings
    )


def tuned(job: Job, **options: Any) -> tuple[flatout.Run, Iterator[int]]:
    """Return flatout's run and its steps. By default, flatout knows only that the training is long.

    Args:
        job: the job to train.
        options: arguments of ``flatout.optimize``.
    """
    model = made(job)
    run = flatout.optimize(
        model,
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=True),
        job.optimizer(model.parameters(), lr=job.lr),
        job.loss_fn,
        **{"expected_steps": LONG, **options},
    )
    return run, steps_of(run)


@dataclass(frozen=True)
class Tuning:
    """Result of flatout's tuning.

    Attributes:
        kept: techniques that are on, as text.
        seconds: duration of the tuning.
        folder: folder of the flatout that tuned.
    """

    kept: str
    seconds: float
    folder: Path


def tuned_loop(name: str, budget: float) -> tuple[Iterator[int], Tuning]:
    """Return flatout's steps and the result of the tuning, for a lane.

    Args:
        name: name of the job in ``JOBS``.
        budget: seconds that flatout may take to tune.
    """
    run, steps = tuned(JOBS[name](), budget=budget)
    return steps, Tuning(kept_by(run), run.report.summary.tuning_seconds, Path(flatout.__file__).parent)


def steps_of(run: flatout.Run) -> Iterator[int]:
    """Train as in the README."""
    while True:
        for batch in run.loader:
            run.step(batch)
            yield size_of(batch)


def kept_by(run: flatout.Run) -> str:
    """Return all techniques that are on, with the chosen values, as text."""
    return ", ".join(f"{row.title} ({row.chosen})" for row in run.report.rows if row.status == "kept" and row.chosen)

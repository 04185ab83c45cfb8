"""The loops of benchmarks/optimize.py: one job, trained as people write it, as experts do, and by three libraries.

Each is a generator that trains a step and yields its samples. All have the same model, data, batch size and optimizer.
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
"""Steps that a training worth optimizing takes: compilation may pay."""


@dataclass(frozen=True)
class Flags:
    """What an expert chooses by hand, and would tell a library to use."""

    bf16: bool = False
    compile: bool = False
    channels_last: bool = False
    plain_attention: bool = False

    def __str__(self) -> str:
        return " + ".join(name for name, on in vars(self).items() if on) or "eager fp32"


def made(job: Job) -> nn.Module:
    """The job's model on the device, with the same weights each time."""
    torch.manual_seed(0)
    return job.model().to(DEVICE)


def size_of(batch: Any) -> int:
    """Samples of a batch."""
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch[0])


def moved(batch: Any) -> Any:
    """The batch on the device."""
    if isinstance(batch, dict):
        return {key: value.to(DEVICE) for key, value in batch.items()}
    return [part.to(DEVICE) for part in batch]


def naive(job: Job) -> Iterator[int]:
    """As first written: default loader, default optimizer, the loss read in every step."""
    model = made(job)
    optimizer = job.optimizer(model.parameters(), lr=job.lr)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, shuffle=True)
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
    """By hand, in plain torch: the data set as tensors on the device, drawn by index; fused optimizer; nothing read.

    What is compiled is model and loss in one.
    """
    step = expert_step(job, flags, *model_and_optimizer(job, flags))
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
    """The expert's step: trains on a batch that is on the device."""

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
    """Every sample, made once and stacked, on the device."""
    samples = [job.dataset[i] for i in range(len(job.dataset))]  # type: ignore[arg-type]
    keys = samples[0].keys() if isinstance(samples[0], dict) else range(len(samples[0]))
    return {key: torch.stack([sample[key] for sample in samples]).to(DEVICE) for key in keys}


def fabric(job: Job, flags: Flags, workers: int) -> Iterator[int]:
    """Lightning Fabric with the flags that its documentation recommends and the expert found to pay."""
    from lightning.fabric import Fabric

    engine = Fabric(accelerator=DEVICE.type, devices=1, precision="bf16-mixed" if flags.bf16 else "32-true")
    model, optimizer = model_and_optimizer(job, flags)
    wrapped, wrapped_optimizer = engine.setup(torch.compile(model) if flags.compile else model, optimizer)
    loader = engine.setup_dataloaders(_loader(job, workers))
    yield from _steps(job, engine, wrapped, wrapped_optimizer, loader)


def accelerated(job: Job, flags: Flags, workers: int) -> Iterator[int]:
    """Hugging Face accelerate, likewise."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # its settings are the process's, and jobs differ
    engine = Accelerator(
        mixed_precision="bf16" if flags.bf16 else "no",
        cpu=DEVICE.type == "cpu",
        dynamo_backend="inductor" if flags.compile else "no",
    )
    model, optimizer = model_and_optimizer(job, flags)
    wrapped, wrapped_optimizer, loader = engine.prepare(model, optimizer, _loader(job, workers))
    yield from _steps(job, engine, wrapped, wrapped_optimizer, loader)


def _steps(job: Job, engine: Any, model: Any, optimizer: Any, loader: Any) -> Iterator[int]:
    """What both libraries have people write."""
    while True:
        for batch in loader:
            engine.backward(job.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield size_of(batch)


def model_and_optimizer(job: Job, flags: Flags) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The job's model as the flags ask for it, and torch's fused optimizer."""
    torch.compiler.config.cache_key_tag = str(flags)  # the caches on disk do not tell attention kernels apart
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
    """flatout, told no more than that the training is long.

    Args:
        job: what is trained.
        options: of ``flatout.optimize``.
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
        kept: what is on.
        seconds: what the tuning took.
        folder: of the flatout that tuned.
    """

    kept: str
    seconds: float
    folder: Path


def tuned_loop(name: str, budget: float) -> tuple[Iterator[int], Tuning]:
    """flatout's steps, for a lane.

    Args:
        name: of the job in ``JOBS``.
        budget: seconds that flatout may take to tune.
    """
    run, steps = tuned(JOBS[name](), budget=budget)
    return steps, Tuning(kept_by(run), run.report.summary.tuning_seconds, Path(flatout.__file__).parent)


def steps_of(run: flatout.Run) -> Iterator[int]:
    """As the README has people train."""
    while True:
        for batch in run.loader:
            run.step(batch)
            yield size_of(batch)


def kept_by(run: flatout.Run) -> str:
    """Every technique that is on, and how."""
    return ", ".join(f"{row.title} ({row.chosen})" for row in run.report.rows if row.status == "kept" and row.chosen)

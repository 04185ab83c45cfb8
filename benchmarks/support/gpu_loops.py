"""Loops and figures that benchmarks/optimize_gpu.py and benchmarks/case_study.py share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from support.gpu_jobs import GpuJob
from support.loops import DEVICE, LONG, naive_steps, size_of

import flatout
from flatout.core import formatting
from flatout.data import map_tensors, to_device
from flatout.mfu import FlopCount, count_flops, measured_peak_flops, peak_flops

ON_GPU = DEVICE.type == "cuda"


def as_first_written(job: GpuJob) -> Iterator[int]:
    """Train in float32 with torch's defaults, and read the loss in every step."""
    yield from naive_steps(job, *job.made(), job.batches())


def amp(job: GpuJob) -> Iterator[int]:
    """Train as in tutorials, with autocast and GradScaler of ``torch.amp``."""
    model, optimizer = job.made()
    loader = job.batches()
    scaler = torch.amp.GradScaler(DEVICE.type)
    while True:
        for batch in loader:
            optimizer.zero_grad()
            with torch.amp.autocast(DEVICE.type):
                loss = job.loss(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield size_of(batch)


def tuned(job: GpuJob, techniques: dict[str, Any] | None, budget: float) -> flatout.Run:
    """Return flatout's run of a job, for a long training."""
    model, optimizer = job.made()
    return flatout.optimize(
        model,
        job.batches(),
        optimizer,
        job.loss_fn,
        techniques=techniques,
        expected_steps=LONG,
        budget=budget,
    )


def flops_of(job: GpuJob) -> FlopCount:
    """Return the FLOPs of one sample, counted on a batch of one sample."""
    model, _ = job.made()
    one = map_tensors(lambda tensor: tensor[:1], to_device(next(iter(job.batches())), DEVICE))
    return count_flops(_Loss(job, model), one)


class _Loss(torch.nn.Module):
    def __init__(self, job: GpuJob, model: torch.nn.Module) -> None:
        super().__init__()
        self.job, self.model = job, model

    def forward(self, batch: Any) -> torch.Tensor:
        return self.job.loss(self.model, batch)


def share_of_bf16(flops_per_second: float) -> float | None:
    """Return the share of the dense bf16 peak: that of the data sheet on a GPU, and a measured one on a CPU."""
    peak = (peak_flops if ON_GPU else measured_peak_flops)(DEVICE, torch.bfloat16)
    return None if peak is None else flops_per_second / peak


def percent(value: float | None) -> str:
    """Return a share in percent, or "-" for None."""
    return "-" if value is None else formatting.share(value, 1)

"""Verdict on a job's use of the device, with a sample of the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flatout.mfu.verdict import DENSE, Bottleneck, Verdict, family_of, judge
from flatout.monitor import GpuSample
from flatout.monitor.nvml import Gpus
from flatout.report.model import Row
from flatout.report.remedies import untried
from flatout.training.job import Job
from flatout.training.step_flops import peak_of

REMEDIES: Mapping[Bottleneck, tuple[str, ...]] = {
    "loader": ("workers", "in_memory"),
    "launch": ("compile", "cuda_graph", "batch_size"),
    "kernels": ("precision", "tf32", "channels_last", "compile", "fused_optimizer", "batch_size"),
}
"""Techniques against each kind of limit."""


def judged(job: Job, mfu: float | None, rows: Iterable[Row], **where: Any) -> Verdict:
    """Return the verdict on a job that has just run with the given MFU, with the untried techniques.

    Args:
        job: the running job.
        mfu: model FLOPs utilization, 0..1, or None if unknown.
        rows: rows of the job's report.
        where: ``stall_fraction`` and ``phases``, as for ``mfu.verdict.judge``.
    """
    counts = job.work.counts
    family = family_of(counts[0].by_op) if counts else DENSE
    _, peak = peak_of(job.spec, job.work)
    gpu = _gpu(job)
    if gpu is not None:
        where |= {
            "utilization": None if gpu.util_percent is None else gpu.util_percent / 100,
            "throttle": gpu.throttle or (),
        }
    return with_remedies(judge(mfu, peak, family, **where), rows)


def with_remedies(verdict: Verdict, rows: Iterable[Row]) -> Verdict:
    """Return a verdict with the techniques against its limit that a report's rows show as untried."""
    return replace(verdict, remedies=tuple(untried(rows, REMEDIES.get(verdict.bottleneck, ()))))


def _gpu(job: Job) -> GpuSample | None:
    """Return an NVML sample of the job's GPU, or None if the job has no GPU or NVML does not identify the GPU."""
    if job.spec.device.type != "cuda":
        return None
    nvml = Gpus(interval=1.0)
    try:
        gpus, _ = nvml.sample(os.environ)
        return next((gpu for gpu in gpus if gpu.cuda_index == job.spec.device.index), None)
    finally:
        nvml.close()

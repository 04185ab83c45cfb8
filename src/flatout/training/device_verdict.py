"""Verdict on the device use of a job, with a sample of the GPU."""

from __future__ import annotations

import os
from typing import Any

from flatout.mfu.verdict import DENSE, Verdict, family_of, judge
from flatout.monitor import GpuSample
from flatout.monitor.nvml import Gpus
from flatout.training.job import Job
from flatout.training.step_flops import peak_of


def judged(job: Job, mfu: float | None, **where: Any) -> Verdict:
    """Return the verdict on a job that has just run with the given MFU.

    Args:
        job: the running job.
        mfu: 0..1; None if unknown.
        where: ``stall_fraction`` and ``phases``, as for ``mfu.verdict.judge``.
    """
    counts = job.work.counts
    family = family_of(counts[0].by_op) if counts else DENSE
    _, peak = peak_of(job.spec, measure=False)
    gpu = _gpu(job)
    if gpu is not None:
        where |= {
            "utilisation": None if gpu.util_percent is None else gpu.util_percent / 100,
            "throttle": gpu.throttle or (),
        }
    return judge(mfu, peak, family, **where)


def _gpu(job: Job) -> GpuSample | None:
    """Return an NVML sample of the job's GPU; None if the job has no GPU or NVML does not identify it."""
    if job.spec.device.type != "cuda":
        return None
    nvml = Gpus(interval=1.0)
    try:
        gpus, _ = nvml.sample(os.environ)
        return next((gpu for gpu in gpus if gpu.cuda_index == job.spec.device.index), None)
    finally:
        nvml.close()

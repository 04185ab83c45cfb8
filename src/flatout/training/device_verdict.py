"""Verdict on a job's use of the device, with a sample of the GPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from flatout.mfu import MfuCounter, TensorCores
from flatout.mfu.verdict import DENSE, Bottleneck, Verdict, family_of, judge
from flatout.monitor import GpuSample
from flatout.monitor.nvml import FIRST_SAMPLE, Gpus
from flatout.report.model import Row, untried
from flatout.training.job import Job
from flatout.training.step_flops import peak_of

REMEDIES: Mapping[Bottleneck, tuple[str, ...]] = {
    "loader": ("workers", "in_memory"),
    "launch": ("compile", "cuda_graph", "batch_size"),
    "kernels": ("precision", "tf32", "channels_last", "compile", "fused_optimizer", "batch_size"),
}
"""Techniques against each kind of limit."""

LOOK_SECONDS = 0.2
"""Shortest time over which the activity of tensor cores is measured."""

TRAINED = 0.9
"""Smallest share of this time that steps must fill. Other work, such as an evaluation, is active but not counted."""


def judged(
    job: Job, mfu: float | None, rows: Iterable[Row], tensor_cores: TensorCores | None = None, **where: Any
) -> Verdict:
    """Return the verdict on a job that has just run with the given MFU, with the untried techniques.

    Args:
        job: the running job.
        mfu: model FLOPs utilization, 0..1, or None if unknown.
        rows: rows of the job's report.
        tensor_cores: activity of the tensor cores; None if unknown.
        where: ``stall_fraction`` and ``phases``, as for ``mfu.verdict.judge``.
    """
    counts = job.work.counts
    family = family_of(counts[0].by_op) if counts else DENSE
    peak = peak_of(job.spec, job.work)
    with closing(Gpus()) as gpus:
        gpu = _sample(gpus, job.spec.device)
    if gpu is not None:
        where |= {
            "utilization": None if gpu.util_percent is None else gpu.util_percent / 100,
            "throttle": gpu.throttle or (),
        }
    verdict = replace(judge(mfu, peak.source, family, **where), tensor_cores=tensor_cores)
    if mfu is not None and peak.flops is not None and peak.measured is not None:
        verdict = replace(verdict, of_measured=mfu * peak.flops / peak.measured)
    return with_remedies(verdict, rows)


def with_remedies(verdict: Verdict, rows: Iterable[Row]) -> Verdict:
    """Return a verdict with the techniques against its limit that a report's rows show as untried."""
    return replace(verdict, remedies=tuple(untried(rows, REMEDIES.get(verdict.bottleneck, ()))))


class TensorWatch:
    """Function of a counter that returns the activity of a GPU's tensor cores since its last call.

    NVML's GPM reports the activity on Hopper and later.

    The result is that of the last time that was long enough, and that steps filled. None means that the GPU does not
    report the activity, or that there was no such time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpus: Gpus | None = Gpus()
        weakref.finalize(self, self._gpus.close)
        self._found: TensorCores | None = None
        self._active()
        self._looked = time.perf_counter(), 0.0, 0.0  # time, seconds of steps, and what their FLOPs take at the peak

    def __call__(self, counter: MfuCounter) -> TensorCores | None:
        now, (then, seconds, at_peak) = time.perf_counter(), self._looked
        if self._gpus is None or now - then < LOOK_SECONDS:
            return self._found
        active, total = self._active(), counter.total
        share = total.mfu if total.hfu is None else total.hfu
        self._looked = now, total.seconds, total.seconds * (share or 0.0)
        if active is not None and total.seconds - seconds >= TRAINED * (now - then):
            self._found = TensorCores(active, None if share is None else (self._looked[2] - at_peak) / (now - then))
        return self._found

    def _active(self) -> float | None:
        """Return the share of the time since the last call in which the tensor cores worked, 0..1; None if unknown."""
        gpu = None if self._gpus is None else _sample(self._gpus, self._device)
        if gpu is not None and gpu.tensor_active_percent is not None:
            return gpu.tensor_active_percent / 100
        if gpu is None or gpu.gpm != FIRST_SAMPLE:
            self._gpus = None  # later samples will not report it
        return None


def tensor_watch(job: Job) -> Callable[[MfuCounter], TensorCores | None]:
    """Return a watch of the tensor cores that compute a job's products, or a function that returns None."""
    return TensorWatch(job.spec.device) if peak_of(job.spec, job.work).on_tensor_cores else lambda counter: None


def _sample(gpus: Gpus, device: torch.device) -> GpuSample | None:
    """Return an NVML sample of a device, or None if it is no GPU or NVML does not identify the GPU."""
    if device.type != "cuda":
        return None
    samples, _ = gpus.sample()
    return next((gpu for gpu in samples if gpu.cuda_index == device.index), None)

"""Does a candidate train the same model? Losses over a short run, compared with the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.job import Job

STEPS = 8


def loss_trajectory(job: Job, batches: Sequence[Any], steps: int = STEPS) -> list[float]:
    """Losses of ``steps`` training steps over ``batches`` in turn, from the present state on."""
    return [float(job.step(batches[i % len(batches)])) for i in range(steps)]


def loss_difference(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Mean absolute difference of two trajectories, relative to the baseline's mean magnitude.

    A NaN or infinity in the candidate alone gives infinity.
    """
    scale = sum(abs(b) for b in baseline) / len(baseline)
    difference = sum(abs(b - c) for b, c in zip(baseline, candidate, strict=True)) / len(baseline)
    relative = difference / scale if scale > 0 else difference
    return relative if relative == relative else float("inf")

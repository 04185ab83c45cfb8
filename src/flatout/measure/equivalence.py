"""Does a candidate train the same model? What a short run shows of it, compared with the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.data import tensors_of
from flatout.job import Job

UPDATES = 8


def observe(job: Job, batches: Sequence[Any]) -> list[Tensor]:
    """What to compare, from the present state on.

    With an optimizer: the losses of the batches of ``UPDATES`` updates, each 0-dim. Without one nothing is updated,
    and a sum of outputs would hide differences: the model's outputs for every batch, elementwise.
    """
    if job.optimizer is not None:
        return [job.step(batches[i % len(batches)]).float() for i in range(UPDATES * job.accumulate)]
    if job.inference:
        outputs = [tensors_of(job.infer(batch)) for batch in batches]
    else:
        with torch.no_grad():
            if job.compute_loss is not None:
                return [job.loss(batch).float() for batch in batches]
            outputs = [tensors_of(job.forward(batch)[0]) for batch in batches]
    return [t.float() for tensors in outputs for t in tensors if t.is_floating_point()]


def difference(baseline: Sequence[Tensor], candidate: Sequence[Tensor]) -> float:
    """Sum of absolute differences relative to the sum of the baseline's magnitudes.

    A NaN or infinity on either side gives infinity.
    """
    total = sum(float((b - c).abs().sum()) for b, c in zip(baseline, candidate, strict=True))
    scale = sum(float(b.abs().sum()) for b in baseline)
    relative = total / scale if scale > 0 else total
    return relative if relative == relative else float("inf")

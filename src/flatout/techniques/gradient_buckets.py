"""Additional technique: buckets in which DDP averages gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatout.techniques.base import Effect, NothingBetter, StepTechnique
from flatout.techniques.candidate import Candidate
from flatout.techniques.reducer_options import check_reducer, reducer_candidate

if TYPE_CHECKING:
    from flatout.training.job import Job

SIZES = (25, 100, 5)
"""Bucket sizes to try, in MiB."""


class GradientBuckets(StepTechnique):
    """Changes how many bytes of gradients one all-reduce averages over the ranks.

    When it helps: larger buckets need fewer all-reduces, for networks with a high latency. Smaller ones begin earlier,
    for fast networks. When it hurts: an all-reduce of one large bucket begins after most of the backward.

    With more than two ranks, the bucket decides the order in which a sum is rounded.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
    """

    name = "gradient_buckets"
    title = "gradient buckets"
    expected = "depends on the network"
    rationale = "gradients are averaged in buckets of this size"
    values = "True, a size in MiB >= 1"
    keeps_cpu_time = False
    saves_communication = True

    def check(self, job: Job) -> None:
        """Require several ranks that average the gradients during the backward."""
        check_reducer(job)

    def effect_on(self, job: Job) -> Effect:
        """Return "exact" for two ranks, because a sum of two gradients has only one order."""
        return "exact" if job.spec.ranks.size == 2 else self.effect

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return a candidate for each size that changes the buckets.

        Raises:
            NothingBetter: all sizes lead to the present buckets.
        """
        total = sum(p.nbytes for p in job.spec.trained)
        by_bytes = {min(size << 20, total): size for size in reversed(SIZES)}
        present = None if job.stepper.sync is None else job.stepper.sync.options.bucket_bytes
        if present is not None:
            by_bytes.pop(min(present, total), None)
        if not by_bytes:
            raise NothingBetter("all gradients are in one bucket already")
        return [_candidate(job, size) for size in SIZES if size in by_bytes.values()]

    def accepts(self, value: Any) -> bool:
        """Accept True, or a number of MiB."""
        return value is True or (type(value) is int and value >= 1)

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a size in MiB. True means 25."""
        return _candidate(job, SIZES[0] if value is True else value)


def _candidate(job: Job, size: int) -> Candidate:
    return reducer_candidate(job, f"{size} MiB", size, bucket_bytes=size << 20)

"""Neighbour: buckets in which DDP averages gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatout.core.out_of_memory import parameters_of
from flatout.techniques.base import NotApplicable
from flatout.techniques.candidate import Candidate
from flatout.techniques.reducer_options import ReducerCandidate, ReducerTechnique

if TYPE_CHECKING:
    from flatout.training.job import Job

SIZES = (25, 100, 5)
"""Sizes of a bucket to try, in MiB. DDP's default is 25, with 1 for the first bucket."""


class GradientBuckets(ReducerTechnique):
    """Averages the gradients of several ranks in buckets of another size, in which the gradients stay.

    When it helps: larger buckets need fewer all-reduces, for networks with a high latency. Smaller ones begin earlier,
    for fast networks. With ``gradient_as_bucket_view`` no gradient is copied out of its bucket, and gradients take half
    of the memory. When it hurts: an all-reduce of one large bucket begins after most of the backward.

    With more than two ranks, the bucket decides the order in which a sum is rounded.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
    """

    name = "gradient_buckets"
    title = "gradient buckets"
    rationale = "gradients are averaged in buckets of this size, and are not copied out of them"
    values = "True, a size in MiB >= 1"

    def check(self, job: Job) -> None:
        """Require an optimizer of all trained parameters, because other gradients outlive a step in their buckets."""
        super().check(job)
        assert job.spec.optimizer is not None
        updated = {id(p) for p in parameters_of(job.spec.optimizer)}
        if any(id(p) not in updated for p in job.spec.trained):
            raise NotApplicable(
                "some gradients are kept from step to step, because the optimizer lacks their parameters"
            )

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the sizes that lead to different buckets."""
        total = sum(p.nbytes for p in job.spec.trained)
        by_bytes = {min(size << 20, total): size for size in reversed(SIZES)}
        return [_candidate(job, size) for size in SIZES if size in by_bytes.values()]

    def accepts(self, value: Any) -> bool:
        """Accept True, or a number of MiB."""
        return value is True or (type(value) is int and value >= 1)

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a size; True is the first candidate."""
        return self.candidates(job)[0] if value is True else _candidate(job, value)


def _candidate(job: Job, size: int) -> Candidate:
    return ReducerCandidate(job, f"{size} MiB", size, bucket_bytes=size << 20, gradient_as_bucket_view=True)

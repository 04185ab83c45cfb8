"""Technique 13 of the checklist: advice on the stages of loading, where the training waits for data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.data import InMemoryLoader, NotExamined, PrefixCache, is_rewindable, sample_stages
from flatout.data.loader_class import base_of, why_not_plain
from flatout.data.stages import Stage
from flatout.mfu.verdict import WORTH_TELLING
from flatout.techniques.base import Advice, NotApplicable

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job


class LoadingStages(Advice):
    """Names what takes the time of a batch: reading, decoding, resizing, each transform and the collation, with lines.

    When it helps: the training waits for data. Then the slowest stage is the one to make faster, for example by smaller
    images on the disk. When it hurts: a few samples are evaluated, after the trials.
    """

    name = "loading_stages"
    number = 13
    title = "stages of loading"
    expected = "less time per sample"

    def check(self, job: Job) -> None:
        """Reject loaders whose samples cannot be evaluated beside the training, or are already in memory."""
        if base_of(job.data.loader) is None:
            raise NotApplicable(why_not_plain(job.data.loader))
        if not is_rewindable(job.data.loader):
            raise NotApplicable("the loader cannot be rewound: looking at its samples might lose some")
        if isinstance(job.data.source, InMemoryLoader):
            raise NotApplicable("the samples are in memory, ready made: no transform runs any more")

    def findings(self, job: Job, pace: Pace, seconds: float) -> Sequence[str | Stage]:
        """Return the stages of :func:`flatout.data.sample_stages` if the training waits for data."""
        if pace.load_fraction < WORTH_TELLING:
            raise NotApplicable(f"loading is not the limit: it takes less than {100 * WORTH_TELLING:.0f} % of the time")
        loader = base_of(job.data.source) or base_of(job.data.loader)
        if loader is None or isinstance(loader.dataset, PrefixCache):
            raise NotApplicable("flatout keeps the samples before their random steps, or makes them natively")
        try:
            return sample_stages(loader, seconds=seconds, device=job.spec.device)
        except NotExamined as error:
            raise NotApplicable(str(error)) from error

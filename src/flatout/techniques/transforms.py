"""Technique 13 of the checklist: advice on per-sample torch operations that the device could run on whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from flatout.data import InMemoryLoader, NotExamined, is_rewindable, movable_transforms
from flatout.data.loader_class import is_plain, why_not_plain
from flatout.techniques.base import Advice, NotApplicable

if TYPE_CHECKING:
    from flatout.training.job import Job


class Transforms(Advice):
    """Names the transforms that could run on the device, whole batches at once, with file and line. It moves none.

    When it helps: the conversion of bytes to normalized floats often takes a third of a sample's time, and floats take
    four times the bytes to copy. When it hurts: a few samples are evaluated once, before training.
    """

    name = "transforms"
    number = 13
    title = "transforms on the device"
    expected = "less time per sample"

    def check(self, job: Job) -> None:
        """Reject loaders whose samples cannot be evaluated beside the training, or are already in memory."""
        if not is_plain(job.data.loader):
            raise NotApplicable(why_not_plain(job.data.loader))
        if not is_rewindable(job.data.loader):
            raise NotApplicable("the loader cannot be rewound: looking at its samples might lose some")
        if isinstance(job.data.source, InMemoryLoader):
            raise NotApplicable("the samples are in memory, ready made: no transform runs any more")

    def findings(self, job: Job, seconds: float) -> Sequence[str]:
        """Return the findings of :func:`flatout.data.movable_transforms`, followed by advice."""
        assert isinstance(job.data.loader, DataLoader)
        try:
            found = movable_transforms(job.data.loader, seconds=seconds)
        except NotExamined as error:
            raise NotApplicable(str(error)) from error
        if not found:
            raise NotApplicable(
                "no torch operation that could run on whole batches takes a good part of a sample's time"
            )
        return [*map(str, found), *dict.fromkeys(f"What to do: {each.advice}" for each in found)]

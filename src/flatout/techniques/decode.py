"""Technique 13 of the checklist: image files are decoded and transformed by native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatout.data.in_memory_loader import InMemoryLoader
from flatout.data.loader_class import base_of, why_not_plain
from flatout.data.seeding import is_seeded
from flatout.guards import SAMPLES_FIXED
from flatout.techniques.base import LoaderTechnique, NotApplicable
from flatout.techniques.candidate import LoaderCandidate
from flatout.techniques.prefix_cache import PrefixSource

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job


class Decode(LoaderTechnique):
    """Decodes JPEG files and makes their crops, resizes, flips and normalized tensors in native code.

    It serves an ``ImageFolder`` of torchvision with torchvision's own loader and the usual transforms. simplejpeg
    decodes in place of Pillow. Draws, order and samples are the user's, bit for bit. Pillow decodes files for which
    simplejpeg has an error or a warning, so that Pillow's errors appear.

    When it helps: images take a considerable part of the time of a batch. When it hurts: never by much, because a file
    that Pillow has to decode is opened twice.

    Source: `pytest benchmarks/images.py`.
    """

    name = "decode"
    number = 13
    title = "native decode"
    expected = "up to 2× for loading"
    assumes = (SAMPLES_FIXED,)
    rationale = "native code decodes and transforms images, with the same bits"

    def check(self, job: Job) -> None:
        """Require a DataLoader over a dataset that is not in memory."""
        base = base_of(job.data.loader)
        if base is None:
            raise NotApplicable(why_not_plain(job.data.loader))
        if isinstance(job.data.source, InMemoryLoader):
            raise NotApplicable("the samples are in memory, ready made")
        if is_seeded(job.data.loader):
            raise NotApplicable("each sample has its own seed")

    def candidates(self, job: Job, pace: Pace | None = None) -> Sequence[LoaderCandidate]:
        """Return the loader."""
        return [self.candidate_of(job, True)]

    def candidate_of(self, job: Job, value: Any) -> LoaderCandidate:
        """Return the loader."""
        loader = job.data.source if base_of(job.data.source) is not None else job.data.loader
        return PrefixSource(self.name, loader, 1.0, 0, job.breaks, "simplejpeg")

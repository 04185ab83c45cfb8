"""Technique 13 of the checklist: image files are decoded and transformed by native code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatout.guards import SAMPLES_FIXED
from flatout.techniques.base import LoaderTechnique
from flatout.techniques.candidate import LoaderCandidate
from flatout.techniques.prefix_cache import PrefixSource, check_loader, loader_of

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
        check_loader(job)

    def candidates(self, job: Job, pace: Pace | None = None) -> Sequence[LoaderCandidate]:
        """Return the loader."""
        return [self.candidate_of(job, True)]

    def candidate_of(self, job: Job, value: Any) -> LoaderCandidate:
        """Return the loader."""
        return PrefixSource(self.name, loader_of(job), 1.0, 0, job.breaks, "simplejpeg")

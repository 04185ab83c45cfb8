"""Technique 13 of the checklist: a faster decoder of JPEG files."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from flatout.core.breaks import Breaks
from flatout.core.random_state import RandomState
from flatout.data import NotCacheable, clone_loader
from flatout.data.decode import FastDecoding, decoded_files, why_not_decodable
from flatout.data.in_memory_loader import InMemoryLoader
from flatout.data.loader_class import base_of, why_not_plain
from flatout.data.loaders import reading_again
from flatout.data.packed import bytes_of
from flatout.data.prefix import PrefixCache
from flatout.data.seeding import is_seeded
from flatout.data.workers_watch import check_epochs
from flatout.guards import SAMPLES_FIXED
from flatout.techniques.base import LoaderTechnique, NotApplicable
from flatout.techniques.candidate import LoaderCandidate

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

_LOOKED_AT = 4
"""Samples, spread over the dataset, that are made with both decoders."""


@dataclass
class DecodedSource:
    """User's loader, over a dataset whose JPEG files simplejpeg decodes."""

    loader: Any
    breaks: Breaks
    label: str = "simplejpeg"
    value: Any = True

    def make(self) -> Any:
        """Build the loader. Some samples are made several times.

        Native code also makes the transforms after the decoder, where it can.

        Raises:
            NotApplicable: the samples have no JPEG files, or are not the same with both decoders.
        """
        base = base_of(self.loader)
        assert base is not None
        with reading_again(base):
            reason = why_not_same(base.dataset)
        if reason:
            raise NotApplicable(reason)
        try:
            if is_seeded(self.loader):
                raise NotCacheable("each sample has its own seed")
            made: Any = PrefixCache(base.dataset, byte_budget=0)
            made.on_change = functools.partial(SAMPLES_FIXED.broken, self.breaks, Decode.name)
        except NotCacheable:
            return clone_loader(self.loader, dataset=FastDecoding(base.dataset))
        return check_epochs(clone_loader(self.loader, dataset=made))


def why_not_same(dataset: Any) -> str:
    """Return why samples are not made, or are not the same, with simplejpeg, as a clause; empty if they are."""
    last = len(dataset) - 1
    rows = sorted({round(i * last / (_LOOKED_AT - 1)) for i in range(_LOOKED_AT)})
    fast = FastDecoding(dataset)
    try:
        with decoded_files() as files, RandomState.capture(dataset).restored():
            dataset[rows[0]]
        if not files:
            return "no sample is a JPEG file that Pillow decodes"
        if reason := why_not_decodable():
            return reason
        for row in rows:
            with RandomState.capture(dataset).restored():
                expected = bytes_of(dataset[row])
            if bytes_of(fast[row]) != expected:
                return f"dataset[{row}] is another sample"
    except NotCacheable as error:
        return f"samples cannot be compared: {error}"
    except Exception as error:  # the user's own code, which raises again in the training
        return f"a sample raised {type(error).__name__}: {error}"
    return ""


class Decode(LoaderTechnique):
    """Decodes JPEG files with simplejpeg, a binding of libjpeg-turbo, in place of Pillow.

    Native code also makes the usual crops, resizes, flips and normalization of torchvision after an ``ImageFolder``.
    Samples are the same, bit for bit: some are compared when the technique is tried, and test images at each start.
    Files that simplejpeg cannot decode without a warning are decoded by Pillow, whose errors and warnings appear.

    When it helps: decoding takes a considerable part of a sample's time. When it hurts: never by much, because a file
    that Pillow has to decode is read twice.

    Source: `pytest benchmarks/images.py`.
    """

    name = "decode"
    number = 13
    title = "JPEG decoder"
    expected = "20–100 % for loading"
    assumes = (SAMPLES_FIXED,)
    rationale = "JPEG files are decoded by simplejpeg, with the same bits"

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds to make some samples twice."""
        return pace.load_ms / 1e3

    def check(self, job: Job) -> None:
        """Require a DataLoader over a map-style dataset that is not in memory."""
        base = base_of(job.data.loader)
        if base is None:
            raise NotApplicable(why_not_plain(job.data.loader))
        if isinstance(base.dataset, IterableDataset):
            raise NotApplicable("the dataset is iterable, not map-style")
        if isinstance(job.data.source, InMemoryLoader):
            raise NotApplicable("the samples are in memory, ready made")
        if find_spec("PIL") is None:
            raise NotApplicable("Pillow is not installed")

    def candidates(self, job: Job, pace: Pace | None = None) -> Sequence[LoaderCandidate]:
        """Return the loader."""
        return [self.candidate_of(job, True)]

    def candidate_of(self, job: Job, value: Any) -> LoaderCandidate:
        """Return the loader over a dataset with the other decoder."""
        return DecodedSource(job.data.source if base_of(job.data.source) is not None else job.data.loader, job.breaks)

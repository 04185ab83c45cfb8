"""Technique 13 of the checklist: what comes before the random transforms of a sample is kept in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.core import formatting
from flatout.core.breaks import Breaks
from flatout.core.machine import available_memory
from flatout.data import NotCacheable, clone_loader
from flatout.data.cache import SampleCache
from flatout.data.in_memory_loader import InMemoryLoader
from flatout.data.loader_class import base_of, why_not_plain
from flatout.data.loaders import known_length
from flatout.data.prefix import PrefixCache
from flatout.data.seeding import is_seeded
from flatout.data.workers_watch import check_epochs
from flatout.guards import SAMPLES_FIXED
from flatout.techniques.base import LoaderTechnique, NotApplicable
from flatout.techniques.candidate import LoaderCandidate
from flatout.techniques.in_memory import why_unsure

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

_REHEARSED = 2
"""Batches whose samples stand for all samples in trials."""


@dataclass
class PrefixSource:
    """User's loader, over a :class:`PrefixCache`.

    Args:
        technique: name of the technique.
        loader: loader with a base (``base_of``).
        epochs: expected number of epochs.
        budget: bytes of all stored samples together.
        breaks: receives a change of the dataset that ends the cache.
        label: name in the report.
    """

    technique: str
    loader: Any
    epochs: float
    budget: int
    breaks: Breaks
    label: str
    value: Any = True
    reason: str = ""

    def make(self) -> Any:
        """Build the loader. Some samples are made several times.

        Raises:
            NotApplicable: the samples have no such part, or it cannot be stored.
        """
        base = base_of(self.loader)
        assert base is not None
        try:
            cache = PrefixCache(_unstored(base.dataset), byte_budget=self.budget)
        except NotCacheable as error:
            raise NotApplicable(str(error)) from error
        cache.on_change = functools.partial(SAMPLES_FIXED.broken, self.breaks, self.technique)
        if self.budget:
            cache.rehearse(cache.share * (1 - 1 / self.epochs), _REHEARSED * (base.batch_size or 1))
            self.reason = (
                f"{formatting.share(cache.share)} of the samples fit, at {cache.sample_bytes / 1e3:,.0f} kB each. "
                f"The first of {self.epochs:,.1f} epochs stores them"
            )
        return check_epochs(clone_loader(self.loader, dataset=cache))


class PrefixCaching(LoaderTechnique):
    """Keeps the front of each sample in memory: what is read, decoded and resized before the first random transform.

    The first epoch stores samples while it trains. Later epochs run only the rest of the transforms. Draws, order and
    results are the user's, bit for bit. Workers share the memory. Samples that do not fit are made as before.

    When it helps: decoding takes a considerable part of a sample's time, samples fit in memory, and the training has
    several epochs. When it hurts: samples are decoded in little time, so that copying them costs as much.

    Source: `pytest benchmarks/images.py`.
    """

    name = "prefix_cache"
    number = 13
    title = "decoded samples kept"
    expected = "2× for loading"
    assumes = (SAMPLES_FIXED,)
    rationale = "samples are decoded once, and only their random transforms run in each epoch"

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds to make the samples that are compared, and those that stand for all in trials."""
        return (_REHEARSED + 1) * pace.load_ms / 1e3

    def most_saved(self, job: Job, pace: Pace) -> float:
        """Return the time that later epochs wait for their batches."""
        return pace.load_ms * max(0.0, 1 - 1 / _epochs(job))

    def check(self, job: Job) -> None:
        """Require several epochs of a DataLoader over a map-style dataset that is not in memory yet."""
        check_loader(job)
        if job.data.expected_steps and _epochs(job) <= 1:
            raise NotApplicable("the training has one epoch, which reads each sample once")

    def candidates(self, job: Job, pace: Pace | None = None) -> Sequence[LoaderCandidate]:
        """Return the loader.

        Raises:
            NotApplicable: the dataset could change without being seen.
        """
        if seen := why_unsure(job, pace):
            raise NotApplicable(SAMPLES_FIXED.reason(seen))
        return [self.candidate_of(job, True)]

    def candidate_of(self, job: Job, value: Any) -> LoaderCandidate:
        """Return the loader, also if the dataset could change without being seen."""
        budget = available_memory() // (2 * job.spec.ranks.size)
        epochs = max(1.0, _epochs(job))
        return PrefixSource(self.name, loader_of(job), epochs, budget, job.breaks, "in memory")

    def found(self, candidate: PrefixSource) -> str:
        """Return how many samples fit."""
        return candidate.reason


def check_loader(job: Job) -> None:
    """Require a DataLoader whose samples are not in memory and have no seeds of their own.

    Raises:
        NotApplicable: the job has another loader.
    """
    base = base_of(job.data.loader)
    if base is None:
        raise NotApplicable(why_not_plain(job.data.loader))
    if isinstance(job.data.source, InMemoryLoader) or isinstance(_unstored(base.dataset), SampleCache):
        raise NotApplicable("the samples are in memory, ready made")
    if is_seeded(job.data.loader):
        raise NotApplicable("each sample has its own seed")


def loader_of(job: Job) -> Any:
    """Return the loader that the job uses now, or the user's loader if the former has no base."""
    return job.data.source if base_of(job.data.source) is not None else job.data.loader


def _unstored(dataset: Any) -> Any:
    """Return the dataset of a cache that stores nothing, which the technique "decode" makes."""
    return dataset.dataset if isinstance(dataset, PrefixCache) and not dataset.share else dataset


def _epochs(job: Job) -> float:
    """Return the expected number of epochs of the training."""
    return job.data.expected_steps / (known_length(job.data.loader) or max(1, job.data.expected_steps))

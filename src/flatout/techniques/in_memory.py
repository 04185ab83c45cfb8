"""13: data that fits in memory is gathered natively, without a Python call per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from flatout.data import InMemoryLoader, NotCacheable, cache_in_memory, why_not_in_memory
from flatout.techniques.base import LoaderTechnique, NotApplicable, Source

if TYPE_CHECKING:
    from flatout.job import Job
    from flatout.report.model import Pace


@dataclass
class InMemorySource:
    """The user's DataLoader replayed from memory: the same batches in the same order."""

    label: str
    loader: DataLoader[Any]
    build: Callable[[DataLoader[Any]], InMemoryLoader]
    value: Any = True

    def make(self) -> InMemoryLoader:
        """Build the loader; caching decodes every sample once.

        Raises:
            NotApplicable: a sample turned out to be random, ragged or too large to keep.
        """
        try:
            return self.build(self.loader)
        except NotCacheable as error:
            raise NotApplicable(str(error)) from error


class InMemory(LoaderTechnique):
    """Gathers each batch from tensors in memory by native threads, ahead of the step.

    A ``TensorDataset`` is gathered from where it is; the samples of a deterministic map-style dataset are decoded
    once and kept. Order, values, types and random-number consumption equal the DataLoader's without workers.

    When it helps: a DataLoader spends 5 to 50 microseconds of Python on every sample, whatever its size. When it
    hurts: it takes the memory of the decoded data; random augmentation must not be frozen, so a dataset that
    draws random numbers is left alone.
    """

    name = "in_memory"
    number = 13
    title = "data in memory"
    kept_because = "samples are decoded once and gathered by native threads, with no Python call per sample"
    exact = True

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Caching reads every sample once, as one epoch does; data that is tensors already needs none."""
        if not isinstance(job.loader, DataLoader) or why_not_in_memory(job.loader) is None:
            return 0.0
        return pace.load_ms / 1e3 * len(job.loader)

    def check(self, job: Job) -> None:
        """A DataLoader; which kinds can be replayed exactly is found out by ``candidates``."""
        if not isinstance(job.loader, DataLoader):
            raise NotApplicable(f"the loader is a {type(job.loader).__name__}, not a DataLoader")

    def candidates(self, job: Job, pace: Pace | None = None) -> Sequence[Source]:
        """Gathering where the data is tensors already, else the cache."""
        assert isinstance(job.loader, DataLoader)
        if why_not_in_memory(job.loader) is None:
            return [InMemorySource("gathered", job.loader, InMemoryLoader)]
        return [InMemorySource("cached", job.loader, cache_in_memory)]

    def forced(self, job: Job, value: Any) -> Source:
        """True is the only value."""
        if value is not True:
            raise ValueError(f"techniques['{self.name}'] must be True or False, got {value!r}")
        return self.candidates(job)[0]

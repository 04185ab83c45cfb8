"""Technique 13 of the checklist: data that fits in memory is gathered natively, without a Python call per sample."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from flatout.core.breaks import Breaks
from flatout.core.contents import Contents
from flatout.data import (
    CachedDataset,
    InMemoryLoader,
    NotCacheable,
    WorkerError,
    cache_in_memory,
    clone_loader,
    why_not_in_memory,
)
from flatout.data.in_memory_loader import why_not_collated
from flatout.data.loader_class import base_of, is_plain, why_not_plain
from flatout.data.workers_watch import check_epochs
from flatout.guards import SAMPLES_FIXED
from flatout.techniques.base import LoaderTechnique, NotApplicable
from flatout.techniques.batch_size import size_of
from flatout.techniques.candidate import LoaderCandidate

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

WATCH_SHARE, FEWEST_WATCH_SECONDS = 0.01, 1e-3
"""Largest share of an epoch that looking for changes may take, and seconds that are always allowed."""


@dataclass
class InMemorySource:
    """Replay of the user's DataLoader from memory: the same batches in the same order."""

    label: str
    loader: DataLoader[Any]
    build: Callable[[DataLoader[Any]], InMemoryLoader | DataLoader[Any]]
    breaks: Breaks
    value: Any = True
    reason: str = ""

    def make(self) -> InMemoryLoader | DataLoader[Any]:
        """Build the loader. Caching decodes every sample once.

        Raises:
            NotApplicable: a sample is random, ragged or too large to store, or a worker failed.
        """
        try:
            made = self.build(self.loader)
        except (NotCacheable, WorkerError) as error:
            raise NotApplicable(str(error)) from error
        on_change = functools.partial(SAMPLES_FIXED.broken, self.breaks, InMemory.name)
        if isinstance(made, InMemoryLoader):
            made.report_change(on_change)
        else:
            made.dataset.on_change = on_change  # type: ignore[attr-defined]
        return made


def collated_from_memory(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return ``loader`` with its own collate and workers, over decoded samples.

    Raises:
        NotCacheable: the samples cannot be stored. The message gives the reason.
        WorkerError: a worker process died.
    """
    samples = CachedDataset(loader.dataset)
    samples.fill(num_workers=loader.num_workers, multiprocessing_context=loader.multiprocessing_context)
    return check_epochs(clone_loader(loader, dataset=samples))


class InMemory(LoaderTechnique):
    """Keeps all samples in memory, and gathers each batch from there by native threads, ahead of the step.

    A ``TensorDataset`` is gathered in place. The samples of a deterministic map-style dataset are decoded once and
    stored. Order, values, types and random-number consumption equal those of the DataLoader without workers. If only
    the user's own collate can make batches of the samples, the DataLoader stays, over samples in memory.

    When it helps: a DataLoader spends 5 to 50 microseconds of Python on every sample, of any size. When it hurts: it
    takes the memory of the decoded data. A dataset that draws random numbers is left alone, because random augmentation
    must not be frozen. A dataset that the script could change without being seen is kept only if it is forced.

    Source: `pytest benchmarks/data_path.py --full` for "2 to 200x", by the size of a sample, on 2 cores of an AMD EPYC.
    """

    name = "in_memory"
    number = 13
    title = "data in memory"
    expected = "2 to 200× for loading"
    values = "True, 'device'"
    assumes = (SAMPLES_FIXED,)
    rationale = "samples are decoded once and gathered by native threads, with no Python call per sample"

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds to read every sample once, for the cache. Data that is already tensors needs no cache."""
        if not isinstance(job.data.loader, DataLoader) or why_not_in_memory(job.data.loader) is None:
            return 0.0
        # Workers load while the step runs, so this is at most the sum of both.
        batch_ms = pace.load_ms + (pace.step_ms if job.data.loader.num_workers else 0.0)
        # An epoch may draw samples several times, or only some. The cache reads each once.
        return batch_ms / 1e3 * len(job.data.loader.dataset) / size_of(job)  # type: ignore[arg-type]

    def check(self, job: Job) -> None:
        """Require a plain DataLoader. ``candidates`` finds out whether it can be replayed exactly."""
        if not is_plain(job.data.loader):
            raise NotApplicable(why_not_plain(job.data.loader))
        if job.data.loader.num_workers > 0 and job.data.loader.worker_init_fn is not None:
            raise NotApplicable("worker_init_fn runs in worker processes only, and may change what they load")

    def candidates(self, job: Job, pace: Pace | None = None) -> Sequence[LoaderCandidate]:
        """Return loaders that gather tensors, on the GPU if possible, or a cache of other data.

        Raises:
            NotApplicable: the dataset could change without being seen.
        """
        candidates = _sources(job)
        if why_not_in_memory(job.data.loader) is not None and (seen := why_unsure(job, pace)):
            raise NotApplicable(SAMPLES_FIXED.reason(seen))
        return candidates

    def found(self, candidate: InMemorySource) -> str:
        """Return how changes of the data are seen."""
        return candidate.reason

    def accepts(self, value: Any) -> bool:
        """Accept True or ``"device"``."""
        return value is True or (isinstance(value, str) and value == "device")

    def check_value(self, job: Job, value: Any) -> None:
        """Reject "device" for data that is not tensors."""
        super().check_value(job, value)
        reason = why_not_in_memory(job.data.loader) if value == "device" else None
        if reason is not None:
            raise NotApplicable(f"data cannot be kept on the device: {reason}")

    def candidate_of(self, job: Job, value: Any) -> LoaderCandidate:
        """Return the candidate. For "device", tensors are copied to the device once and gathered there."""
        return _on_device(job) if value == "device" else _sources(job)[-1]

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if the user's loader is already an ``InMemoryLoader``."""
        return value is True and isinstance(job.data.loader, InMemoryLoader)


def _sources(job: Job) -> list[InMemorySource]:
    loader, breaks = job.data.loader, job.breaks
    assert isinstance(loader, DataLoader)
    if why_not_in_memory(loader) is None:
        reason = "changes are seen by versions of the tensors"
        gathered = InMemorySource("gathered", loader, InMemoryLoader, breaks, reason=reason)
        return [_on_device(job), gathered] if job.spec.device.type == "cuda" else [gathered]
    reason = "changes are seen by hashes of what the dataset holds, and by samples that are read again in each epoch"
    if why_not_collated(loader) is None:
        return [InMemorySource("cached", loader, cache_in_memory, breaks, reason=reason)]
    return [InMemorySource("cached samples", loader, collated_from_memory, breaks, reason=reason)]


def _on_device(job: Job) -> InMemorySource:
    assert isinstance(job.data.loader, DataLoader)
    build = functools.partial(InMemoryLoader, device=job.spec.device)
    reason = "changes are seen by versions and hashes of the tensors"
    return InMemorySource("on the device", job.data.loader, build, job.breaks, value="device", reason=reason)


def why_unsure(job: Job, pace: Pace | None) -> str:
    """Return what of the dataset could change without being seen, or only at a considerable price."""
    loader = base_of(job.data.loader)
    assert loader is not None
    contents = Contents(loader.dataset)
    if contents.opaque or pace is None:
        return contents.opaque
    begun = time.perf_counter()
    contents.changed()
    seconds, epoch = time.perf_counter() - begun, len(loader) * pace.step_ms / 1e3
    if seconds <= WATCH_SHARE * epoch or seconds < FEWEST_WATCH_SECONDS:
        return ""
    return f"looking for changes of it takes {1e3 * seconds:.0f} ms of an epoch of {1e3 * epoch:.0f} ms"

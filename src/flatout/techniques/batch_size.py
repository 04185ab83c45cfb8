"""Technique 3 of the checklist: batch size."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatout.core.batches import batch_size_of, resized, to_device
from flatout.data import seed_samples
from flatout.data.loaders import (
    RESIZED_FROM,
    SEEDED_FROM,
    TRIAL_BATCHES,
    first_batches,
    unsliced,
    why_not_resized,
    with_batch_size,
)
from flatout.data.seeding import is_seeded
from flatout.distributed.process_group import group_size
from flatout.guards import MEAN_OVER_SAMPLES, Guard
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate
from flatout.training.autocast import autocast_dtype
from flatout.training.learning_rate import LR_RULES

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

FEWEST_UPDATES = 8
"""Minimum of updates per epoch with ``batch_size="auto"``, unless the epoch had fewer."""

SMALLEST = 8
"""Smallest size that is tried, unless batches are smaller. A BatchNorm cannot train on one sample."""

TRIAL_STEPS = 20
"""Maximum number of steps in the search for a size."""


class BatchCandidate(Candidate):
    """Loader with another batch size, batches computed in parts, or both.

    Args:
        job: the job whose loader and trial batches are replaced.
        samples: samples per batch of the loader, on all ranks together; None for no change.
        micro_batch: samples that a rank computes at once; None for whole batches.
        reason: findings of the search.
    """

    resizes = True

    def __init__(self, job: Job, samples: int | None = None, micro_batch: int | None = None, reason: str = "") -> None:
        self.reason = reason
        self._job = weakref.ref(job)
        self.micro_batch = self._parked_size = micro_batch
        self._parked: weakref.WeakKeyDictionary[Job, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        before = size_of(job)
        is_resized = hasattr(job.data.loader, RESIZED_FROM)
        size = samples or (before if is_resized else None)
        self.value = {"samples": size, "micro_batch": micro_batch}
        if size is not None:
            self.value["lr_rule"] = job.spec.lr_rule
        self.scale = 1.0 if samples is None else samples / before
        self.label = f"batches of {samples:,}" if samples else "whole batches"
        if micro_batch is not None:
            self.label = f"{self.label}, in parts of {micro_batch:,}" if samples else f"parts of {micro_batch:,}"

    def _turn_on(self) -> None:
        job = self._job()
        if job is None:
            return
        if self.scale != 1.0 and job not in self._parked:
            loader: Any = with_batch_size(_unseeded(job.data.loader), self.value["samples"])
            loader = seed_samples(loader) if is_seeded(job.data.loader) else loader
            taken = first_batches(loader, TRIAL_BATCHES)
            taken = taken[: int(job.spec.ranks.smallest([len(taken)])[0])]
            batches = [to_device(batch, job.spec.device) for batch in taken]
            self._parked[job] = loader, loader, batches, math.ceil(job.data.expected_steps / self.scale)
        self._exchange(job)

    def _turn_off(self) -> None:
        job = self._job()
        if job is not None:
            self._exchange(job)

    def _exchange(self, job: Job) -> None:
        sizes = job.stepper.micro_batches
        self._parked_size, sizes.size = sizes.size, self._parked_size
        if job in self._parked:
            here = job.data.loader, job.data.source, job.data.batches, job.data.expected_steps
            job.data.loader, job.data.source, job.data.batches, job.data.expected_steps = self._parked[job]
            self._parked[job] = here

    def on_tuning_end(self) -> None:
        """Free the trial's batches."""
        for job, (loader, source, _, expected_steps) in self._parked.items():
            self._parked[job] = loader, source, (), expected_steps


class BatchSize(StepTechnique):
    """Finds the micro-batch that trains fastest, without running out of memory.

    A few sizes are timed. Their measured memory predicts the memory of larger sizes. The size that is found then gets a
    trial like any technique. The samples per update stay the same: a loader's batch is computed in parts if these are
    faster. With ``optimize(batch_size="auto")`` the loader is rebuilt with the fastest batch size that fits in memory,
    and the learning rate is scaled.

    When it helps: batches that leave the device idle (``"auto"``), activations that exceed a CPU's cache, and batches
    that do not fit in memory. When it hurts: large batches generalize worse (Keskar et al., 2017, arXiv:1609.04836) and
    need another learning rate, so they require a request. Parts are not tried if a BatchNorm trains, because it would
    normalize each part by itself.

    Sources: `pytest benchmarks/batch_size.py --full` for "up to 2.2x" (batches of 32 to 512 on 2 cores of an AMD EPYC);
    Goyal et al., 2017 (arXiv:1706.02677) for the learning rate; McCandlish et al., 2018 (arXiv:1812.06162) for
    the size above which larger batches gain little.
    """

    name = "batch_size"
    number = 3
    title = "batch size"
    expected = "up to 2.2×"
    rationale = "so many samples at once are the fastest that memory holds"
    effect = "reseeded"
    assumes = (MEAN_OVER_SAMPLES,)
    values = "{'micro_batch': SAMPLES} (optimize(batch_size=...) changes the samples of an update)"

    def assumed(self, job: Job, value: Any = None) -> Sequence[Guard]:
        """Return the guards if batches may be computed in parts."""
        in_parts = value.get("micro_batch") is not None if isinstance(value, Mapping) else not job.spec.resizes
        return self.assumes if in_parts else ()

    def check(self, job: Job) -> None:
        """Require ``run.step`` and batches that can be split."""
        if job.why_no_step:
            raise NotApplicable(f"{job.why_no_step}: batches are as they come")
        if any(resized(batch, 1) is None for batch in job.data.batches[:1]):
            raise NotApplicable("the batches hold what cannot be taken apart along the samples")
        reason = why_not_resized(_unseeded(job.data.loader)) if job.spec.resizes else ""
        if reason:
            raise NotApplicable(reason)

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds of the search's steps. Steps take longer if sizes may grow."""
        return (4 if job.spec.resizes else 1) * TRIAL_STEPS * pace.step_ms / 1e3

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return no candidate, because the tuner searches ``sizes`` first, and then tries the one of ``sized``."""
        return ()

    def sizes(self, job: Job) -> tuple[int, int, int]:
        """Return the present, the smallest and the largest number of samples on a rank for the search.

        The numbers are sizes of the loader's batches, or of their parts.

        Raises:
            NotApplicable: nothing can be searched.
        """
        reason = self._why_not_search(job)
        if reason:
            raise NotApplicable(reason)
        largest = self._largest(job)
        own = -(-size_of(job) // _shared_by(job)) if job.spec.resizes else largest
        now = job.stepper.micro_batches.size or own
        return now, min(SMALLEST, now), max(now, largest)

    def sized(self, job: Job, samples: int, reason: str) -> Candidate:
        """Return the candidate for batches of ``samples`` samples on each rank, or for parts of this size.

        Args:
            job: the training.
            samples: result of the search.
            reason: result of the search, in one sentence.
        """
        if job.spec.resizes:
            return BatchCandidate(job, samples=samples * _shared_by(job), reason=reason)
        return BatchCandidate(job, micro_batch=None if samples >= self._largest(job) else samples, reason=reason)

    def found(self, candidate: BatchCandidate) -> str:
        """Return the findings of the search."""
        return candidate.reason

    def accepts(self, value: Any) -> bool:
        """Accept ``{"micro_batch": 64}``, or a plan's ``{"samples": 512, "micro_batch": 64, "lr_rule": "sqrt"}``."""
        if not isinstance(value, Mapping):
            return False
        sizes = dict(value)
        rule = sizes.pop("lr_rule", "none")
        known = bool(sizes) and not sizes.keys() - {"samples", "micro_batch"}
        return known and rule in LR_RULES and all(map(_is_size, sizes.values()))

    def check_value(self, job: Job, value: Any) -> None:
        """Reject a size that the loader cannot have."""
        super().check_value(job, value)
        samples = value.get("samples")
        if samples is not None and samples != size_of(job):
            reason = why_not_resized(_unseeded(job.data.loader))
            if reason:
                raise ValueError(f"batch_size must be possible with this loader, got {samples} samples: {reason}")
            there_are = len(unsliced(_unseeded(job.data.loader)).sampler)
            if samples > there_are:
                raise ValueError(f"batch_size must fit an epoch, got batches of {samples}, with {there_are} samples")

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return batches of ``value["samples"]`` in parts of ``value["micro_batch"]``."""
        samples = value.get("samples")
        return BatchCandidate(job, None if samples == size_of(job) else samples, value.get("micro_batch"))

    def whole(self, job: Job) -> BatchCandidate:
        """Return the candidate that computes batches whole."""
        return BatchCandidate(job)

    def _why_not_search(self, job: Job) -> str:
        if group_size() > job.spec.ranks.size:
            return "several processes train together, and each would find another size"
        if job.spec.resizes:
            return ""
        if job.stepper.micro_batches.sees_parts:
            return "BatchNorm would normalize each part of a batch by itself"
        if not job.stepper.micro_batches.weighs_right and autocast_dtype(job.spec.model) is not None:
            return (
                "in 16 bits a trial cannot tell whether the loss of a batch is the mean of its parts' losses: "
                "optimize(loss_weight=...) can"
            )
        largest = self._largest(job)
        return f"batches of {largest} are not worth being taken apart" if largest <= SMALLEST else ""

    @staticmethod
    def _largest(job: Job) -> int:
        """Return the limit of samples that a rank computes at once."""
        if not job.spec.resizes:
            return largest_batch(job)
        samples = len(unsliced(_unseeded(job.data.loader)).sampler)
        return samples // (FEWEST_UPDATES * job.spec.accumulate * _shared_by(job))


def largest_batch(job: Job) -> int:
    """Return the number of samples of the largest batch for trials, on the rank with the most."""
    return int(job.spec.ranks.largest([max(map(batch_size_of, job.data.batches), default=0)])[0])


def size_of(job: Job) -> int:
    """Return the batch size of the job's loader, or the size of its first batch if the loader has no batch size.

    The batch size counts the samples of all ranks together.
    """
    size = getattr(unsliced(_unseeded(job.data.loader)), "batch_size", None)
    if isinstance(size, int):
        return size
    return batch_size_of(job.data.batches[0]) if job.data.batches else 1


def _shared_by(job: Job) -> int:
    """Return the number of ranks that share each batch of the loader."""
    loader = _unseeded(job.data.loader)
    return 1 if unsliced(loader) is loader else job.spec.ranks.size


def _unseeded(loader: Any) -> Any:
    """Return the loader that seeds no samples, from which a loader with seeds was made."""
    return getattr(loader, SEEDED_FROM, loader)


def _is_size(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)

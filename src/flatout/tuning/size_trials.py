"""Trial steps with other batch sizes, and the memory limit of these steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flatout.core import formatting
from flatout.core.batches import batch_size_of, resized, tensors_within
from flatout.core.errors import free_memory, parameters_of, ran_out_of_memory, state_bytes
from flatout.core.machine import available_memory, local_ranks
from flatout.distributed.process_group import group_size
from flatout.techniques.batch_size import BatchCandidate, largest_batch
from flatout.training.micro_batches import part_sizes
from flatout.tuning.size_finder import Found, find
from flatout.tuning.size_models import Probe
from flatout.tuning.step_memory import step_memory
from flatout.tuning.timing import seconds

if TYPE_CHECKING:
    from flatout.training.job import Job

T = TypeVar("T")

MARGIN = 0.1
"""Share of a device's memory that stays free.

torch's caching allocator cannot use fragments, libraries allocate workspaces, and later batches may be longer.
"""

TIMED = 2
"""Number of timed steps per size. The faster one counts, because delays come from other processes."""


class SizeTrials:
    """Trial steps on batches of any size, made from the job's samples.

    Each step is one update on a whole batch. The steps change the training state, which the caller restores.

    Args:
        job: the training, with an optimizer and at least one batch.

    Attributes:
        steps: number of steps so far.
    """

    def __init__(self, job: Job) -> None:
        self.steps = 0
        self._job = job

    def find(self, start: int, *, smallest: int, largest: int) -> Found:
        """Return the fastest batch size within memory, in fewer than 20 steps. See :func:`find`."""
        with self._job.stepper.whole_updates():
            self._stepping(self._batch(smallest))()  # the first step creates gradients and optimizer state
        return find(
            self.probe,
            start=start,
            smallest=smallest,
            largest=largest,
            limit=memory_limit(self._job),
            resident=resident_bytes(self._job),
        )

    def probe(self, samples: int) -> Probe | None:
        """Return the measurements of a few steps with ``samples`` samples; None if they ran out of memory."""

        def probed() -> Probe:
            batch = self._batch(samples)
            allocated, step = self._height(batch), self._stepping(batch)
            took = min(seconds(step, self._job.spec.device, self._job.spec.ranks) for _ in range(TIMED))
            return Probe(samples, took, allocated)

        return self._within_memory(probed)

    def height(self, samples: int) -> int | None:
        """Return the peak memory of training during a step with ``samples`` samples, in bytes; None if unknown.

        Raises:
            torch.OutOfMemoryError: the step ran out of memory.
        """
        with self._job.stepper.whole_updates():
            batch = self._batch(samples)
            self._stepping(batch)()
            return self._height(batch)

    def fits(self, samples: int) -> bool:
        """Return True if a step with ``samples`` samples fits in memory."""
        height = self._within_memory(lambda: self.height(samples) or 0)
        return height is not None and height <= memory_limit(self._job)

    def most_that_fit(self, most: int) -> int | None:
        """Return the largest number of samples that fits in memory; None if one sample does not fit.

        The number is predicted from a small step. Speed is not considered.
        """
        samples = most
        while not self.fits(samples := max(1, samples // 8)):
            if samples == 1:
                return None
        height, resident = self.height(samples), resident_bytes(self._job)
        if height is None:
            return samples
        foretold = int(samples * (memory_limit(self._job) - resident) / max(1, height - resident))
        foretold = min(most, foretold // 8 * 8 or foretold)
        return foretold if foretold > samples and self.fits(foretold) else samples

    def _height(self, batch: Any) -> int | None:
        """Return the peak memory of a step in bytes, after optimizer state exists.

        Gradients count as memory of the step.
        """
        self._job.stepper.zero_grad()
        spec = self._job.spec
        allocated = step_memory(self._stepping(batch), spec.device, is_warm=True, ranks=spec.ranks)
        if allocated is None:
            return None
        of_batch = spec.ranks.largest([sum(t.nbytes for t in tensors_within(batch))])[0]
        return allocated + int(of_batch) + resident_bytes(self._job)

    def _stepping(self, batch: Any) -> Callable[[], None]:
        def step() -> None:
            self.steps += 1
            self._job.stepper.step(batch)

        return step

    def _batch(self, samples: int) -> Any:
        batch = max(self._job.data.batches, key=batch_size_of)
        return batch if batch_size_of(batch) == samples else resized(batch, samples)

    def _within_memory(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; None if it ran out of memory."""
        try:
            with self._job.spec.ranks.attempt(), self._job.stepper.whole_updates():
                return work()
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
        # Here the error is freed, and with it the frames that hold the graph.
        free_memory(self._job.spec.device)
        return None


def resident_bytes(job: Job) -> int:
    """Return the bytes that stay between steps: parameters, buffers, optimizer state, and DDP's buckets for gradients.

    Gradients belong to a step.
    """
    assert job.spec.optimizer is not None
    owned = [t for module in job.spec.modules for t in (*module.parameters(), *module.buffers())]
    tensors = {id(t): t for t in (*parameters_of(job.spec.optimizer), *owned)}
    own = sum(t.nbytes for t in tensors.values()) + state_bytes(job.spec.optimizer)
    own += 0 if job.stepper.sync is None else job.stepper.sync.bucket_bytes
    return int(job.spec.ranks.largest([own])[0])


def memory_limit(job: Job) -> float:
    """Return the memory limit of training in bytes on each rank, at most ``job.spec.memory_limit``.

    The limit is the device's free memory with a margin, on the rank with the least. Ranks on one machine share the
    memory of its CPU.

    On a GPU, the trials' own copy of model and optimizer state counts as used.
    """
    if job.spec.device.type == "cuda":
        index = torch.cuda.current_device() if job.spec.device.index is None else job.spec.device.index
        free, total = torch.cuda.mem_get_info(index)
        allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
        unused = min(free + torch.cuda.memory_reserved(index), allowed) - torch.cuda.memory_allocated(index)
        unused += sum(p.grad.nbytes for m in job.spec.modules for p in m.parameters() if p.grad is not None)
    else:
        unused = available_memory() // local_ranks()
    left = (1 - MARGIN) * (job.spec.ranks.smallest([unused])[0] + resident_bytes(job))
    return left if job.spec.memory_limit is None else min(left, job.spec.memory_limit)


def parts_that_fit(job: Job) -> BatchCandidate | None:
    """Return the largest parts of batches that fit in memory; None if whole batches fit.

    Ranks that train on their own keep whole batches, because each would find parts of another size.

    Raises:
        torch.OutOfMemoryError: a single sample does not fit in memory, or batches cannot be split.
    """
    if group_size() > job.spec.ranks.size:
        return None
    largest, trials = largest_batch(job), SizeTrials(job)
    if trials.fits(largest):
        return None
    too_large = f"batches of {largest} do not fit into {formatting.size_of(int(memory_limit(job)))}"
    if resized(job.data.batches[0], 1) is None:
        raise torch.OutOfMemoryError(f"{too_large}, and cannot be taken apart")
    samples = trials.most_that_fit(largest - 1)
    if samples is None:
        raise torch.OutOfMemoryError(f"{too_large}, nor does a single sample")
    return BatchCandidate(job, micro_batch=max(part_sizes(largest, samples)))

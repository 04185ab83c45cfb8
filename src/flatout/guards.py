"""Guard of an assumption: its statement, and the experiment that may contradict it before a technique is kept.

A technique lists its guards in ``assumes``. The tuner asks each guard before a trial, and before a forced technique is
turned on. Training may still contradict an assumption later. The part of the technique that runs in training then
watches for this, reverts the technique before a wrong batch or step is used, and calls ``guard.broken``.
"""

from __future__ import annotations

import io
import queue
import socket
import threading
from abc import ABC, abstractmethod
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import DataLoader

from flatout.core import formatting
from flatout.core.batches import batch_size_of, cloned, resized, tensors_of
from flatout.core.breaks import Breaks
from flatout.core.contents import is_closed_module, nodes_in
from flatout.core.effects import Unrepeatable
from flatout.data.feedback import why_not_ahead
from flatout.data.in_memory_loader import why_not_in_memory
from flatout.data.loader_class import base_of
from flatout.data.loaders import reading_again, same_bits
from flatout.data.remote import InWorker
from flatout.training.equal_parts import STATEMENT, why_parts_differ

if TYPE_CHECKING:
    from flatout.training.job import Job


class Guard(ABC):
    """Guard of one assumption.

    Attributes:
        name: key in reports, plans and tests.
        statement: the assumption as a clause that follows "it assumes that".
        is_observed: True if ``contradiction`` only reads what the steps so far have shown. The tuner then asks again
            after more steps.
    """

    name: ClassVar[str]
    statement: ClassVar[str]
    is_observed: ClassVar[bool] = False

    @abstractmethod
    def contradiction(self, job: Job) -> str:
        """Return what contradicts the assumption for this job, as a clause; empty if nothing does.

        The caller restores all changes that the experiment makes.
        """

    @classmethod
    def reason(cls, seen: str) -> str:
        """Return the reason why a technique is refused, for its row and for errors."""
        return f"it assumes that {cls.statement}, but {seen}"

    @classmethod
    def broken(cls, breaks: Breaks, technique: str, seen: str) -> None:
        """Record that training has contradicted the assumption of a technique that was kept."""
        breaks.add(technique, cls.name, cls.statement, seen)


class FirstOrder(Guard):
    """Guard of compiled code, which torch can differentiate once. Training watches each backward."""

    name = "first_order"
    statement = "no gradient is differentiated again"

    def contradiction(self, job: Job) -> str:
        """Return nothing, because modules that are differentiated twice in the recorded updates are not tuned."""
        return ""


class HostRandom(Guard):
    """Guard of steps that are recorded once. A recorded step repeats the numbers that Python and NumPy drew then."""

    name = "host_random"
    statement = "the step draws random numbers from torch's generators only"
    is_observed = True

    def contradiction(self, job: Job) -> str:
        """Return the generator that the first step moved."""
        drawn = job.objective.draws_on_host
        return f"forward or loss draw from {drawn}" if drawn else ""


class MeanOverSamples(Guard):
    """Guard of batches that are computed in parts. The experiment compares parts of a batch with the whole batch."""

    name = "mean_over_samples"
    statement = STATEMENT

    def contradiction(self, job: Job) -> str:
        """Return how parts of the largest trial batch differ from the whole batch."""
        batch: Any = max(job.data.batches, key=batch_size_of, default=None)
        if job.spec.optimizer is None or batch is None or resized(batch, 1) is None:
            return ""  # no batch is computed in parts
        try:
            return why_parts_differ(job.stepper, batch, batch_size_of(batch))
        except Exception as error:  # the user's code may accept only one size
            return f"parts of a batch fail: {formatting.first_line(error)}"


class PythonState(Guard):
    """Guard of steps whose Python code runs once, or only partly, because later steps repeat recorded operators."""

    name = "python_state"
    statement = "the step keeps nothing in Python"
    is_observed = True

    def contradiction(self, job: Job) -> str:
        """Return the attribute, container or variable that steps so far have changed."""
        changed = job.objective.python_state
        return f"forward or loss change {changed}" if changed else ""


class OrderFixed(Guard):
    """The next indices do not depend on the training.

    Samplers of torch draw them from generators only. For a sampler of the user, its code is searched for values that
    training may change. Such a sampler is asked for the next batch when the step needs this batch, and not before.
    """

    name: ClassVar[str] = "order_fixed"
    statement: ClassVar[str] = "the next indices do not depend on the training"

    def contradiction(self, job: Job) -> str:
        """Return the value that the sampler may read when it draws the next indices."""
        return why_not_ahead(job.data.loader)


class SamplesFixed(Guard):
    """Samples do not change, and making one changes nothing.

    The experiment makes some samples twice. Later changes are seen by the loader in memory (``data/watch.py``). Tensors
    that are gathered in place need no experiment.
    """

    name: ClassVar[str] = "samples_fixed"
    statement: ClassVar[str] = "samples do not change"

    def contradiction(self, job: Job) -> str:
        """Return the evidence that samples made twice differ although no generator has moved."""
        if why_not_in_memory(job.data.loader) is None:
            return ""
        try:
            random = job.data.randomness
        except Unrepeatable as reason:
            return str(reason)
        except Exception:  # of a dataset that only worker processes can read
            return ""
        if random is not None and not random.is_drawn:
            return random.reason
        return job.data.changed_by_reading


SAMPLES, SECONDS = 16, 10
"""Number of samples that two processes make for a comparison, and seconds to wait for one of them."""


class SamplesPortable(Guard):
    """Samples can be made in other processes.

    The dataset must reach no file that is open for writing, socket, database, queue, thread, iterator, CUDA tensor, or
    lock that is held. Making a sample must write no file, because two processes would write it at the same time. A
    number that changes whenever a sample is made would count in each process separately. The experiment
    ``differs`` also lets two processes make some samples, and compares them.
    """

    name: ClassVar[str] = "samples_portable"
    statement: ClassVar[str] = "samples can be made in other processes"

    def contradiction(self, job: Job) -> str:
        """Return the object that a process cannot share, or the number or file that making a sample changes."""
        base = base_of(job.data.loader)
        if base is None or not hasattr(base.dataset, "__getitem__"):
            return ""
        for node, label in nodes_in(base.dataset, base.collate_fn, with_locks=True):
            if why := _why_not_shared(node):
                return f"{label} is {why}"
        return job.data.changed_by_reading

    @staticmethod
    def differs(loader: DataLoader[Any]) -> str:
        """Return the first difference between samples of this process and of two workers.

        The samples must draw no random numbers.
        """
        dataset: Any = loader.dataset
        last = len(dataset) - 1
        indices = sorted({round(i * last / (SAMPLES - 1)) for i in range(SAMPLES)})
        others: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=indices,
            num_workers=2,
            collate_fn=_unchanged,
            worker_init_fn=InWorker(None),
            generator=torch.Generator(),
            timeout=SECONDS,
            multiprocessing_context=loader.multiprocessing_context,
        )
        with reading_again(loader):
            try:
                made = [cloned(sample) for sample in others]
            except Exception as error:  # of the dataset, or of a worker that has died
                return f"a worker process failed with {formatting.first_line(error)}"
            for index, sample in zip(indices, made, strict=True):
                here, there = tensors_of(dataset[index]), tensors_of(sample)
                if len(here) != len(there) or not all(map(same_bits, here, there)):
                    return f"sample {index} differs in a worker process"
        return ""


def _unchanged(sample: Any) -> Any:
    return sample


def _why_not_shared(node: Any) -> str:
    """Return the kind of an object that two processes cannot use; empty if they can."""
    kind = type(node)
    if isinstance(node, io.IOBase):
        is_used = not node.closed and not isinstance(node, (io.BytesIO, io.StringIO)) and node.writable()
        return "a file that is open for writing" if is_used and node.fileno() > 2 else ""
    if isinstance(node, (socket.socket, threading.Thread, queue.Queue, queue.SimpleQueue, Queue)):
        return f"a {kind.__name__}"
    if isinstance(node, torch.Tensor):
        return f"a tensor on {node.device}" if node.device.type != "cpu" else ""
    if is_closed_module(kind.__module__):
        return f"a {kind.__module__}.{kind.__qualname__}"
    if hasattr(kind, "__next__") and not hasattr(node, "__dict__"):
        return f"a {kind.__name__}, which each process would exhaust"
    if hasattr(kind, "locked") and node.locked():
        return "a lock that is held"
    return ""


class SamplesSteady(Guard):
    """Samples do not change during an epoch.

    Only training can contradict this. The watch over worker processes (``data/workers_watch.py``) sees the change.
    """

    name: ClassVar[str] = "samples_steady"
    statement: ClassVar[str] = "samples do not change during an epoch"

    def contradiction(self, job: Job) -> str:
        """Return no contradiction before the training."""
        return ""

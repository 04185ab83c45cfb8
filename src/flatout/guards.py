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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class Guard:
    """Guard of one assumption.

    Attributes:
        name: key in reports, plans and tests.
        statement: the assumption as a clause that follows "it assumes that".
        contradiction: returns what contradicts the assumption for a job, as a clause; empty if nothing does. The caller
            restores all changes that the experiment makes. By default, only training can contradict the assumption.
        is_observed: True if ``contradiction`` only reads what the steps so far have shown. The tuner then asks again
            after more steps.
    """

    name: str
    statement: str
    contradiction: Callable[[Job], str] = lambda job: ""
    is_observed: bool = False

    def reason(self, seen: str) -> str:
        """Return the reason why a technique is refused, for its row and for errors."""
        return f"it assumes that {self.statement}, but {seen}"

    def broken(self, breaks: Breaks, technique: str, seen: str) -> None:
        """Record that training has contradicted the assumption of a technique that was kept."""
        breaks.add(technique, self.name, self.statement, seen)


def _drawn_on_host(job: Job) -> str:
    drawn = job.objective.draws_on_host
    return f"forward or loss draw from {drawn}" if drawn else ""


def _changed_in_python(job: Job) -> str:
    changed = job.objective.python_state
    return f"forward or loss change {changed}" if changed else ""


def _why_parts_differ(job: Job) -> str:
    """Return how parts of the largest trial batch differ from the whole batch."""
    batch: Any = max(job.data.batches, key=batch_size_of, default=None)
    if job.spec.optimizer is None or batch is None or resized(batch, 1) is None:
        return ""  # no batch is computed in parts
    try:
        return why_parts_differ(job.stepper, batch, batch_size_of(batch))
    except Exception as error:  # the user's code may accept only one size
        return f"parts of a batch fail: {formatting.first_line(error)}"


def _why_samples_differ(job: Job) -> str:
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


def _why_not_portable(job: Job) -> str:
    """Return the object that a process cannot share, or the number or file that making a sample changes."""
    base = base_of(job.data.loader)
    if base is None or not hasattr(base.dataset, "__getitem__"):
        return ""
    for node, label in nodes_in(base.dataset, base.collate_fn, with_locks=True):
        if why := _why_not_shared(node):
            return f"{label} is {why}"
    return job.data.changed_by_reading


FIRST_ORDER = Guard("first_order", "no gradient is differentiated again")
"""Guard of compiled code, which torch can differentiate once. Training watches each backward. Modules that are
differentiated twice in recorded updates are not tuned."""

HOST_RANDOM = Guard(
    "host_random", "the step draws random numbers from torch's generators only", _drawn_on_host, is_observed=True
)
"""Guard of steps that are recorded once. A recorded step repeats the numbers that Python and NumPy drew then."""

MEAN_OVER_SAMPLES = Guard("mean_over_samples", STATEMENT, _why_parts_differ)
"""Guard of batches that are computed in parts. The experiment compares parts of a batch with the whole batch."""

PYTHON_STATE = Guard("python_state", "the step keeps nothing in Python", _changed_in_python, is_observed=True)
"""Guard of steps whose Python code runs once, or only partly, because later steps repeat recorded operators."""

ORDER_FIXED = Guard(
    "order_fixed", "the next indices do not depend on the training", lambda job: why_not_ahead(job.data.loader)
)
"""Guard of samplers that are asked early.

Samplers of torch draw indices from generators only. For a sampler of the user, its code is searched for values that
training may change. Such a sampler is asked for the next batch when the step needs this batch, and not before.
"""

SAMPLES_FIXED = Guard("samples_fixed", "samples do not change", _why_samples_differ)
"""Guard of samples that are kept: they do not change, and making one changes nothing.

The experiment makes some samples twice. Later changes are seen by the loader in memory (``data/watch.py``). Tensors
that are gathered in place need no experiment.
"""

SAMPLES_PORTABLE = Guard("samples_portable", "samples can be made in other processes", _why_not_portable)
"""Guard of samples that other processes make.

The dataset must reach no file that is open for writing, socket, database, queue, thread, iterator, CUDA tensor, or lock
that is held. Making a sample must write no file, because two processes would write it at the same time. A number that
changes whenever a sample is made would count in each process separately. The experiment ``differs_in_workers`` also
lets two processes make some samples, and compares them.
"""

SAMPLES_STEADY = Guard("samples_steady", "samples do not change during an epoch")
"""Guard of samples that workers make ahead. The watch over worker processes (``data/workers_watch.py``) sees a change
in training."""

SAMPLES, SECONDS = 16, 10
"""Number of samples that two processes make for a comparison, and seconds to wait for one of them."""


def differs_in_workers(loader: DataLoader[Any]) -> str:
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

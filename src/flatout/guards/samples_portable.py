"""Assumption that other processes make the same samples as this one."""

from __future__ import annotations

import io
import queue
import socket
import threading
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import DataLoader

from flatout.core import formatting
from flatout.core.batches import cloned, tensors_of
from flatout.core.contents import is_closed_module, nodes_in
from flatout.data.loader_class import base_of
from flatout.data.loaders import reading_again, same_bits
from flatout.data.remote import InWorker
from flatout.guards.base import Guard

if TYPE_CHECKING:
    from flatout.training.job import Job

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

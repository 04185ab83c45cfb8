"""Reducer of the hidden DDP: its options, and the all-reduces of a backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flatout.distributed.step_clock import StepClock


@dataclass(frozen=True)
class ReducerOptions:
    """Options of DDP's reducer. Another option requires a new DDP.

    Attributes:
        bucket_bytes: bytes of gradients that one all-reduce averages; None: 1 MiB for the first bucket of a backward,
            and 25 MiB for the others, as DDP does.
        gradient_as_bucket_view: True if gradients are views of the buckets, so that no copy leaves a bucket.
        static_graph: True if every step uses the parameters of the first one, so that DDP searches no graph for unused
            parameters.
        compression: dtype of the all-reduces; None: the dtype of the gradients.
    """

    bucket_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    compression: torch.dtype | None = None


class AllReduces:
    """All-reduces of a backward. DDP's hook refers to them, and must not refer to the DDP, which would never be freed.

    Args:
        elements: number of elements of all gradients.
        ranks: number of ranks.
        compression: see ``ReducerOptions``.
        clock: gets a mark when the last all-reduce starts.

    Attributes:
        started: means of the buckets whose all-reduce has started in this backward, in this order.
        steps: number of complete backwards since the last failure.
    """

    def __init__(self, elements: int, ranks: int, compression: torch.dtype | None, clock: StepClock) -> None:
        self.started: list[torch.futures.Future[Tensor]] = []
        self.steps = 0
        self._elements, self._missing = elements, 0
        self._ranks = ranks
        self._compression = compression
        self._clock = clock

    @property
    def is_complete(self) -> bool:
        """True if every bucket was launched. The hook cannot tell from ``is_last``: all are first in a static graph."""
        return self._missing == 0

    def begin(self) -> None:
        """Expect all gradients."""
        self.started, self._missing = [], self._elements

    def forget(self) -> None:
        """Forget a backward that failed."""
        self._missing = self.steps = 0

    def launch(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start the all-reduce of a bucket, and return its future mean."""
        sums = bucket.buffer()
        if self._compression is None:
            part = sums.div_(self._ranks)  # before the sum, which may overflow 16 bits
        else:
            part = torch.div(sums, self._ranks, out=torch.empty_like(sums, dtype=self._compression))
        future = dist.all_reduce(part, async_op=True).get_future()
        self._missing -= sums.numel()
        if self.is_complete:
            self.steps += 1
            self._clock.ready()
        if self._compression is None:
            mean = future.then(lambda done: done.value()[0])
        else:
            mean = future.then(lambda done: sums.copy_(done.value()[0]))
        self.started.append(mean)
        return mean

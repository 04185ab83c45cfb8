"""Samples, tokens and FLOPs of a step. FLOPs are counted once per signature of the batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from flatout.core import formatting
from flatout.core.batches import batch_size_of, objects_of, tensors_of, tensors_within, tokens_of
from flatout.mfu.flop_count import FlopCount
from flatout.mfu.flops import taking_turns
from flatout.native._host import signature

MOST = 256
"""Largest number of signatures that are counted. Each count takes memory for a tree of all modules."""

SHARE = 0.02
"""Largest share of the time since the first count that later counts may take. Each count runs an eager step."""


class Work(NamedTuple):
    """Work of one step, in the order of ``MfuCounter.step``'s arguments.

    Attributes:
        samples: number of samples, as ``batch_size_of`` counts them.
        tokens: number of tokens, as ``tokens_of`` counts them.
        flops: FLOPs of the step, or None if unknown.
    """

    samples: int
    tokens: int
    flops: FlopCount | None


class CountedWork:
    """Function that returns the samples, tokens and FLOPs of ``(*args, **kwargs)``. ``count`` counts the FLOPs.

    ``count`` is called once per signature, which is the shapes and dtypes of all tensors. Batches may have many
    signatures, for example of unpadded text. Counting then continues during training, up to ``MOST`` signatures. A
    signature that is not counted yet has no FLOPs.
    """

    def __init__(self, count: Callable[..., FlopCount | None]) -> None:
        self._count = count
        self._known: dict[bytes, Work] = {}
        self._spent = 0.0
        self._since = 0.0

    @property
    def counts(self) -> list[FlopCount]:
        """Known counts, in the order in which their signatures first occurred."""
        return [work.flops for work in self._known.values() if work.flops is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Work:
        """Return the work of a call with these arguments."""
        key = signature((args, kwargs), Tensor, tensors_within)
        known = self._known.get(key)
        if known is not None:
            return known
        given = (args, kwargs)
        samples = batch_size_of(given) if tensors_of(given) or objects_of(given) else 0
        work = Work(samples, tokens_of(given), None)
        begun = time.perf_counter()
        if not self._known:
            self._since = begun
        elif len(self._known) == MOST or self._spent > SHARE * (begun - self._since):
            return work
        if not taking_turns.acquire(blocking=False):  # a thread that counts may wait for this thread
            return work
        try:
            work = work._replace(flops=self._count(*args, **kwargs))
        except Exception as error:  # of the user's code, or out of memory. Training continues without the figure
            warnings.warn(
                f"the FLOPs of a step could not be counted, its MFU is not known: {formatting.first_line(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            taking_turns.release()
        self._known[key] = work
        self._spent += time.perf_counter() - begun
        return work

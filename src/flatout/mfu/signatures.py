"""FLOPs of steps whose batches differ in shape: each signature is counted once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from flatout.data.batch import tensors_of
from flatout.mfu.flops import FlopCount, taking_turns

MOST = 256
"""Most signatures that are counted: a count holds a tree of all modules."""

SHARE = 0.02
"""Most of the time since the first count that further counts may take: each runs an eager step."""


class CountedFlops:
    """``CountedFlops(count)(*args, **kwargs)``: what ``count(*args, **kwargs)`` says, asked once per signature.

    A signature is the shapes and dtypes of all tensors. Where batches take on many (unpadded text), counting goes on
    as training does, up to ``MOST``: a signature whose turn has not come has no FLOPs yet.
    """

    def __init__(self, count: Callable[..., FlopCount]) -> None:
        self._count = count
        self._known: dict[Hashable, FlopCount | None] = {}
        self._spent = 0.0
        self._since = 0.0

    @property
    def counts(self) -> list[FlopCount]:
        """Those known so far, in the order in which their signatures came."""
        return [count for count in self._known.values() if count is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> FlopCount | None:
        """The FLOPs of such a call; None where they are not known."""
        key = tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_of((args, kwargs)))
        if key in self._known:
            return self._known[key]
        begun = time.perf_counter()
        if not self._known:
            self._since = begun
        elif len(self._known) == MOST or self._spent > SHARE * (begun - self._since):
            return None
        if not taking_turns.acquire(blocking=False):  # whoever counts may wait for this thread
            return None
        try:
            self._known[key] = self._count(*args, **kwargs)
        except Exception as error:  # of the user's code, or out of memory: training is not to end for a figure
            self._known[key] = None
            warnings.warn(
                f"the FLOPs of a step could not be counted, its MFU is not known: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            taking_turns.release()
        self._spent += time.perf_counter() - begun
        return self._known[key]

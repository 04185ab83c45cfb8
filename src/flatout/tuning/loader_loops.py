"""Loops over two loaders in turns, and the record of a trial that compared the loaders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.report.model import Gain, Pace
from flatout.techniques import Candidate
from flatout.tuning.loader_timer import LoaderTimer
from flatout.tuning.progress import Progress
from flatout.tuning.sequence import NoiseFloor
from flatout.tuning.timing import Block

IDLE_BELOW = 0.1
"""Share of a core below which making batches counts as waiting, for a disk or a network."""


@dataclass(frozen=True)
class LoaderComparison:
    """Trial of a loader against another, with the same steps.

    Attributes:
        old: the baseline.
        new: the candidate.
        before: pace of the baseline.
        after: pace of the candidate.
        gain: speed of the candidate relative to the baseline.
        floor: noise of the baseline against itself.
        pair_seconds: seconds of a pair.
    """

    old: Iterable[Any]
    new: Iterable[Any]
    before: Pace
    after: Pace
    gain: Gain
    floor: NoiseFloor
    pair_seconds: float


class LoaderLoops:
    """Training from an old and from a new loader, in turns.

    After a change of loaders, a loop empties its queue. The loop then trains untimed until its queue is filled as in a
    long training. The untimed part also lasts until the other loader's workers have filled their queue, because busy
    workers may slow down everything else. A stretch right after a stretch of the same loop needs no such preparation.

    Args:
        old: the baseline.
        new: the candidate.
        progress: shown between stretches.
        steps: batches of a stretch.
        limit: seconds after which a stretch ends early.
        settle: untimed batches before each stretch. Use 0 for batches that take so long that caches do not matter.
        busy: share of a core that one process keeps busy while it makes batches. Workers that compute slow down the
            step until they have filled their queue.
        on_for_new: candidates that are on only while ``new`` runs.
        scale: samples per batch of ``new``, relative to ``old``. Times of ``old`` are multiplied by it.
    """

    def __init__(
        self,
        old: LoaderTimer,
        new: LoaderTimer,
        progress: Progress,
        *,
        steps: int,
        limit: float,
        settle: int,
        busy: float = 1.0,
        on_for_new: Sequence[Candidate] = (),
        scale: float = 1.0,
    ) -> None:
        self._old, self._new, self._progress = old, new, progress
        self._steps, self._limit, self._settle = steps, limit, settle
        self._is_computing = busy >= IDLE_BELOW
        self._on_for_new = on_for_new
        self._scale = scale
        self._latest: LoaderTimer | None = None

    def old(self, _: int) -> Block:
        """Measure a stretch of the baseline."""
        for candidate in reversed(self._on_for_new):
            candidate.disable()
        return self._stretch(self._old, self._new).scaled(self._scale)

    def new(self, _: int) -> Block:
        """Measure a stretch of the candidate."""
        for candidate in self._on_for_new:
            candidate.enable()
        return self._stretch(self._new, self._old)

    def close(self) -> None:
        """Close both loaders."""
        try:
            self._old.close()
        finally:
            self._new.close()

    def _stretch(self, timer: LoaderTimer, other: LoaderTimer) -> Block:
        self._progress.refresh()
        settle, rest = self._settle, 0.0
        if self._latest is not timer:
            rest = 0.0 if self._latest is None else other.refill_seconds
            timer.empty_queue()
            if timer.queue:
                settle = max(settle, timer.queue if self._is_computing else 1)
        if not self._settle:
            time.sleep(rest)
            rest = 0.0
        timer.settle(settle, rest)
        self._latest = timer
        return timer.stretch(self._steps, self._limit)

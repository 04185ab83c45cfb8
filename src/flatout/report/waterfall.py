"""How the time of a batch fell, technique by technique, from the loop as it came to the loop as tuned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.report.model import Row, Summary


@dataclass(frozen=True)
class WaterfallBar:
    """What one technique changed.

    Attributes:
        row: of the technique.
        ms: what its gain makes of the baseline's time in its own trial; below zero where it saves time.
    """

    row: Row
    ms: float


@dataclass(frozen=True)
class Waterfall:
    """``before``, all ``changes`` and ``unexplained`` together make ``after``.

    Attributes:
        before: milliseconds of a batch in the loop as it came, in the race of the whole.
        changes: of the techniques that trials kept, in that order.
        unexplained: what the race shows beyond the trials.
        after: the same as ``before`` of the loop as tuned.
    """

    before: float
    changes: tuple[WaterfallBar, ...]
    unexplained: float
    after: float


def waterfall(summary: Summary) -> Waterfall | None:
    """How ``before`` became ``after``; None where no trial kept anything, or nobody knows what that came to."""
    if summary.before is None or summary.after is None:
        return None
    before, after = summary.before.total_ms, summary.after.total_ms
    changes = tuple(_changes(summary))
    if not changes or not (math.isfinite(before) and math.isfinite(after) and before > 0):
        return None
    return Waterfall(before, changes, after - before - math.fsum(change.ms for change in changes), after)


def _changes(summary: Summary) -> Iterator[WaterfallBar]:
    rows = {row.technique: row for row in summary.rows}
    for name in summary.won:
        row = rows.get(name)
        trial = None if row is None else row.chosen_trial
        if row is None or trial is None or trial.gain is None or not trial.gain.ratio > 0:
            continue
        ms = trial.paired_ms - trial.baseline_ms
        if math.isfinite(ms):
            yield WaterfallBar(row, ms)

"""Waterfall of a batch's time: the change by each kept technique, from the original loop to the tuned loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.report.model import Row, Summary


@dataclass(frozen=True)
class WaterfallBar:
    """Change by one technique.

    Attributes:
        row: row of the technique.
        ms: time of the candidate minus time of the baseline in the technique's trial, milliseconds. Below zero if the
            technique saves time.
    """

    row: Row
    ms: float


@dataclass(frozen=True)
class Waterfall:
    """Changes from the original loop to the tuned loop.

    ``after`` is the sum of ``before``, all ``changes`` and ``unexplained``.

    Attributes:
        before: milliseconds of a batch in the original loop.
        changes: changes by the techniques that trials kept, in order.
        unexplained: milliseconds of the total change that the trials do not explain.
        after: milliseconds of a batch in the tuned loop.
    """

    before: float
    changes: tuple[WaterfallBar, ...]
    unexplained: float
    after: float


def waterfall(summary: Summary) -> Waterfall | None:
    """Return the waterfall of a report; None if no trial kept a technique or the times are unknown."""
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

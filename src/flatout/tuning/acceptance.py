"""Acceptance of candidates by their trials, and the text of the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flatout.report.model import Row, Trial

KEEP_ABOVE = 1.01
"""Speed above which a candidate is kept. Effects of memory layout of up to 1 % do not last until the next start."""

DROP_BELOW = 1.03
"""Speed below which a candidate is not worth more pairs."""

NO_SLOWER = 0.98
"""Speed above which a candidate counts as no slower."""

HOPELESS = 3.0
"""Slowdown on the first pair above which a candidate is not tried further."""

SAVES_BELOW = 0.95
WORTH_SAVING = 16 * 2**20
"""Limits of a memory saving that pays.

A candidate that is no slower is kept if a step takes less than this share of the memory and saves at least these bytes.
"""


def earns(trial: Trial) -> bool:
    """Return True if the trial shows that the candidate is faster."""
    return not trial.failure and trial.gain is not None and trial.gain.low > KEEP_ABOVE


def spares(trial: Trial) -> bool:
    """Return True if the trial shows that the candidate is no slower."""
    return not trial.failure and trial.gain is not None and trial.gain.low > NO_SLOWER


def saves_memory(trial: Trial) -> bool:
    """Return True if the candidate takes less memory and is no slower."""
    return spares(trial) and saves_bytes(trial.baseline_bytes, trial.candidate_bytes)


def saves_bytes(old: int | None, new: int | None) -> bool:
    """Return True if a step takes enough bytes less; False if a number is unknown."""
    return old is not None and new is not None and new < SAVES_BELOW * old and old - new >= WORTH_SAVING


def ratio(trial: Trial) -> float:
    """Return the gain of a trial; 0 without a gain."""
    return 0.0 if trial.gain is None else trial.gain.ratio


def serves(trial: Trial) -> bool:
    """Return True if the candidate is kept, for its speed or for its memory."""
    return earns(trial) or saves_memory(trial)


def rank(trial: Trial) -> tuple[bool, float]:
    """Return a sort key that ranks speed before memory."""
    return (True, ratio(trial)) if earns(trial) else (False, -(trial.memory or 0.0))


def is_open(trials: Sequence[Trial]) -> bool:
    """Return True if more pairs could show that a rejected candidate is faster, or if there was no trial."""
    timed = [trial.gain for trial in trials if trial.gain is not None and not trial.failure]
    return not trials or any(gain.high >= DROP_BELOW and gain.ratio > 1 / HOPELESS for gain in timed)


def verdict(row: Row, trials: list[Trial], best: Trial | None) -> Row:
    """Return the row for the results of the trials."""
    if best is not None:
        row = replace(row, chosen=best.candidate, gain=best.gain, memory=best.memory, trials=tuple(trials))
        if saves_memory(best) and not earns(best):
            return replace(row, why=f"no slower, and a step takes {1 - (best.memory or 0):.0%} less memory: {row.why}")
        return row
    if not trials:
        return replace(row, status="not tried", why="the budget was spent before a trial could begin")
    closest = max(trials, key=ratio)
    return replace(
        row,
        status="rejected",
        why=_why_rejected(closest),
        gain=closest.gain,
        memory=closest.memory,
        trials=tuple(trials),
    )


def _why_rejected(trial: Trial) -> str:
    if trial.failure or trial.gain is None:
        return trial.failure
    times = f"a step takes {trial.candidate_ms:.2f} ms with it and {trial.baseline_ms:.2f} ms without"
    if trial.gain.ratio <= 1.0:
        return times
    return f"{times}: not shown to be more than {KEEP_ABOVE - 1:.0%} faster"

"""Acceptance: the one rule that keeps, rejects or leaves open a candidate, and gives the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from flatout.core import formatting
from flatout.report.model import Gain, Row, Trial

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

Verdict = Literal["faster", "not faster", "undecided"]
"""Verdict on a gain. "faster" means fast enough to keep, "not faster" means not worth more pairs."""


def limits(noise: float | None, *, has_other_merits: bool = False) -> tuple[float, float]:
    """Return the speed above which a candidate is kept, and the speed below which it is not worth more pairs.

    Every decision about a candidate asks this function. The second limit must not be below the first, so that no gain
    can meet both.

    Args:
        noise: noise floor of the measurement, one standard deviation as in ``Trial.noise``; None if unknown. Today's
            limits are the same for any noise, because the interval of the gain contains the noise.
        has_other_merits: True if being no slower is enough, because the candidate saves memory or cores.
    """
    return (NO_SLOWER, 1.0) if has_other_merits else (KEEP_ABOVE, DROP_BELOW)


def least_saving(noise: float | None) -> float:
    """Return the smallest saving that is worth a trial, as a share of a step's time."""
    return limits(noise)[0] - 1


def verdict(gain: Gain, noise: float | None, *, has_other_merits: bool = False) -> Verdict:
    """Return the verdict on a gain with its interval. See ``limits`` for the other arguments."""
    keep_above, drop_below = limits(noise, has_other_merits=has_other_merits)
    if gain.low > keep_above:
        return "faster"
    return "not faster" if gain.high < drop_below else "undecided"


def earns(trial: Trial, *, has_other_merits: bool = False) -> bool:
    """Return True if the trial shows that the candidate is faster, or no slower if it has other merits."""
    if trial.failure or trial.gain is None:
        return False
    return verdict(trial.gain, trial.noise, has_other_merits=has_other_merits) == "faster"


def saves_memory(trial: Trial) -> bool:
    """Return True if the candidate takes less memory and is no slower."""
    return earns(trial, has_other_merits=True) and saves_bytes(trial.baseline_bytes, trial.candidate_bytes)


def is_kept(trial: Trial) -> bool:
    """Return True if the candidate is kept, for its speed or for its memory."""
    return earns(trial) or saves_memory(trial)


def rank(trial: Trial) -> tuple[bool, float]:
    """Return a sort key that ranks speed before memory."""
    return (True, ratio(trial)) if earns(trial) else (False, -(trial.memory or 0.0))


def is_open(trials: Sequence[Trial]) -> bool:
    """Return True if more pairs could show that a rejected candidate is faster, or if there was no trial."""
    return not trials or any(
        verdict(trial.gain, trial.noise) != "not faster" and trial.gain.ratio > 1 / HOPELESS
        for trial in trials
        if trial.gain is not None and not trial.failure
    )


def row_of(row: Row, trials: Sequence[Trial], best: Trial | None) -> Row:
    """Return the row of a technique for the results of its trials.

    Args:
        row: the row of the kept technique.
        trials: all trials of the technique.
        best: the trial of the candidate to keep, or None.
    """
    if best is not None:
        row = replace(row, chosen=best.candidate, gain=best.gain, memory=best.memory, trials=tuple(trials))
        if saves_memory(best) and not earns(best):
            saved = 1 - (best.memory or 0)
            return replace(row, why=f"no slower, and a step takes {formatting.share(saved)} less memory: {row.why}")
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
    why = f"{times}: not shown to be more than {formatting.share(least_saving(trial.noise), 0)} faster"
    return why if trial.noise is None else f"{why}, with noise of ±{formatting.share(1.96 * trial.noise)}"


def saves_bytes(old: int | None, new: int | None) -> bool:
    """Return True if a step takes enough bytes less; False if a number is unknown."""
    return old is not None and new is not None and new < SAVES_BELOW * old and old - new >= WORTH_SAVING


def ratio(trial: Trial) -> float:
    """Return the gain of a trial; 0 without a gain."""
    return 0.0 if trial.gain is None else trial.gain.ratio

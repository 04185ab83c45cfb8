"""Acceptance of trials: which candidate is kept, and the text of its row."""

from __future__ import annotations

from dataclasses import replace

from flatout.report.model import Row, Trial
from flatout.tuning.trial import FEWEST_PAIRS, KEEP_ABOVE, keeps_pace, pays, saves_memory


def earns(trial: Trial) -> bool:
    """Return True if the candidate is faster with certainty."""
    return not trial.failure and trial.gain is not None and pays(trial.gain, trial.pairs)


def spares(trial: Trial) -> bool:
    """Return True if the candidate is as fast and uses less of the machine."""
    return not trial.failure and trial.gain is not None and keeps_pace(trial.gain, trial.pairs)


def ratio(trial: Trial) -> float:
    """Return the gain of a trial; 0 without a gain."""
    return 0.0 if trial.gain is None else trial.gain.ratio


def serves(trial: Trial) -> bool:
    """Return True if the candidate is kept, for its speed or for its memory."""
    return earns(trial) or saves_memory(trial)


def rank(trial: Trial) -> tuple[bool, float]:
    """Return a sort key that ranks speed before memory."""
    return (True, ratio(trial)) if earns(trial) else (False, -(trial.memory or 0.0))


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
    if trial.pairs < FEWEST_PAIRS:
        return f"{times}, but the budget allowed {trial.pairs} of the {FEWEST_PAIRS} pairs that a verdict needs"
    return f"{times}: not surely more than {KEEP_ABOVE - 1:.0%} faster"

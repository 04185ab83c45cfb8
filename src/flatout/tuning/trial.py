"""Paired trials: two ways to do the same work, interleaved in one process on real batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from flatout.report.model import Gain, Trial
from flatout.tuning.statistics import paired_gain

KEEP_ABOVE = 1.01
"""Lower end of a gain's interval above which a candidate is kept."""

FEWEST_PAIRS = 6
"""Minimum of paired times for a verdict: the interval of a median of five is its range."""

SAVES_BELOW = 0.95
WORTH_SAVING = 16 * 2**20
"""Limits of a memory saving that pays.

A candidate that is no slower is kept if a step takes at most this share of its memory, and saves at least these bytes.
"""

NO_SLOWER = 0.98
"""Lower end of a gain's interval above which a candidate counts as no slower."""

MOST_PAIRS = 40
HOPELESS_AFTER = 3


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of ``work()`` with everything that it queued on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for everything that is queued on a CUDA device. Other devices have no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    baseline: Callable[[int], float], candidate: Callable[[int], float], soft: float, hard: float
) -> tuple[list[float], list[float]]:
    """Measure pairs, in alternating order, until the verdict is clear or the time is up.

    Args:
        baseline: measures pair ``i`` with the baseline and returns seconds.
        candidate: measures pair ``i`` with the candidate, on the same work.
        soft: ``time.perf_counter()`` after which only the pairs needed for a verdict start.
        hard: ``time.perf_counter()`` after which no pair starts. One pair is always measured.

    Returns:
        Seconds of the baseline and of the candidate, one each per pair.
    """
    old: list[float] = []
    new: list[float] = []
    for i in range(MOST_PAIRS):
        if i % 2 == 0:
            old.append(baseline(i))
            new.append(candidate(i))
        else:
            new.append(candidate(i))
            old.append(baseline(i))
        now = time.perf_counter()
        if now > hard or (now > soft and len(old) >= FEWEST_PAIRS) or _is_clear(old, new):
            break
    return old, new


def _is_clear(old: list[float], new: list[float]) -> bool:
    """Return True if more pairs would not change the verdict. Early checks require more than the final margin."""
    if len(old) == HOPELESS_AFTER and all(b < 0.8 * c for b, c in zip(old, new, strict=True)):
        return True
    if len(old) < 2 * FEWEST_PAIRS or len(old) % 4:
        return False
    gain = paired_gain(old, new)
    return gain.low > 1 + 2 * (KEEP_ABOVE - 1) or gain.high < 1.0


def pays(gain: Gain, pairs: int) -> bool:
    """Return True if a measured gain is certain and has enough pairs to keep a candidate."""
    return gain.low > KEEP_ABOVE and pairs >= FEWEST_PAIRS


def keeps_pace(gain: Gain, pairs: int) -> bool:
    """Return True if a candidate that uses less of the machine is as fast, by a median of enough pairs."""
    return gain.ratio >= 1 / KEEP_ABOVE and pairs >= FEWEST_PAIRS


def saves_memory(trial: Trial) -> bool:
    """Return True if a candidate takes less memory at no measurable cost in speed."""
    old, new = trial.baseline_bytes, trial.candidate_bytes
    if trial.failure or trial.gain is None or old is None or new is None:
        return False
    saves = new < SAVES_BELOW * old and old - new >= WORTH_SAVING
    return saves and trial.gain.low > NO_SLOWER and keeps_pace(trial.gain, trial.pairs)


def trial_of(label: str, old: list[float], new: list[float], steps: int) -> Trial:
    """Return the record of paired times, each over ``steps`` steps."""
    return Trial(
        candidate=label,
        baseline_ms=1e3 * median(old) / steps,
        candidate_ms=1e3 * median(new) / steps,
        gain=paired_gain(old, new),
        pairs=len(old),
    )

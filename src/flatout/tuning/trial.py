"""Paired trials: two ways of doing the same work, interleaved in one process on real batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from flatout.report.model import Gain, Trial
from flatout.tuning.statistics import paired_gain

KEEP_ABOVE = 1.01
"""A candidate is kept when the lower end of its gain's interval is above this."""

FEWEST_PAIRS = 6
"""Fewer paired times decide nothing: the interval of a median of five is its range."""

SAVES_BELOW = 0.95
WORTH_SAVING = 16 * 2**20
"""A candidate that is no slower is kept when it leaves a step this share of its memory, and saves so many bytes."""

NO_SLOWER = 0.98
"""Lower end of the interval of a gain that costs no speed."""

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
    """Wait for everything queued on a CUDA device; other devices have no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    baseline: Callable[[int], float], candidate: Callable[[int], float], soft: float, hard: float
) -> tuple[list[float], list[float]]:
    """Measure pairs, in alternating order, until the verdict is clear or the time is up.

    Args:
        baseline: measures pair ``i`` the old way and returns seconds.
        candidate: measures pair ``i`` the new way, on the same work.
        soft: ``time.perf_counter()`` after which no pair beyond the fewest that decide begins.
        hard: ``time.perf_counter()`` after which none begins at all; one pair is always measured.

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
    """Whether more pairs could not change the verdict; looking early asks for more than the final margin."""
    if len(old) == HOPELESS_AFTER and all(b < 0.8 * c for b, c in zip(old, new, strict=True)):
        return True
    if len(old) < 2 * FEWEST_PAIRS or len(old) % 4:
        return False
    gain = paired_gain(old, new)
    return gain.low > 1 + 2 * (KEEP_ABOVE - 1) or gain.high < 1.0


def pays(gain: Gain, pairs: int) -> bool:
    """Whether a measured gain is enough to keep a candidate: sure, and measured often enough to be."""
    return gain.low > KEEP_ABOVE and pairs >= FEWEST_PAIRS


def keeps_pace(gain: Gain, pairs: int) -> bool:
    """Whether a candidate that takes less of the machine is as fast, by a median measured often enough."""
    return gain.ratio >= 1 / KEEP_ABOVE and pairs >= FEWEST_PAIRS


def saves_memory(trial: Trial) -> bool:
    """Whether a candidate takes less memory, and surely costs no speed."""
    old, new = trial.baseline_bytes, trial.candidate_bytes
    if trial.failure or trial.gain is None or old is None or new is None:
        return False
    saves = new < SAVES_BELOW * old and old - new >= WORTH_SAVING
    return saves and trial.gain.low > NO_SLOWER and keeps_pace(trial.gain, trial.pairs)


def trial_of(label: str, old: list[float], new: list[float], steps: int) -> Trial:
    """The record of paired times, each over ``steps`` steps."""
    return Trial(
        candidate=label,
        baseline_ms=1e3 * median(old) / steps,
        candidate_ms=1e3 * median(new) / steps,
        gain=paired_gain(old, new),
        pairs=len(old),
    )

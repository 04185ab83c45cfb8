"""Paired statistics: the gain of a candidate, and its confidence interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flatout.report.model import Gain

RESAMPLES = 2000


def paired_gain(baseline: Sequence[float], candidate: Sequence[float]) -> Gain:
    """Return the median of baseline[i] / candidate[i] with its 95 % bootstrap interval.

    The two times of a pair are measured next to each other, so a slower machine slows both and keeps the ratio. The
    median ignores single pairs that another process disturbed. The interval is the percentile bootstrap of the median
    (Efron, 1979). Its generator is local, so global random state does not change.

    Args:
        baseline: seconds, one per pair.
        candidate: seconds, one per pair, same length.

    Raises:
        ValueError: the lists are empty or differ in length.
    """
    if not baseline or len(baseline) != len(candidate):
        raise ValueError(f"need equally many paired times, got {len(baseline)} and {len(candidate)}")
    ratios = np.asarray(baseline) / np.asarray(candidate)
    picks = np.random.default_rng(0).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    return Gain(ratio=float(np.median(ratios)), low=float(low), high=float(high))

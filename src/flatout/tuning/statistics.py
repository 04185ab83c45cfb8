"""Paired statistics: is the candidate faster, and how sure is that?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flatout.report.model import Gain

RESAMPLES = 2000


def paired_gain(baseline: Sequence[float], candidate: Sequence[float]) -> Gain:
    """Median of baseline[i] / candidate[i] with its 95 % bootstrap interval.

    The two times of a pair were measured next to each other, so a machine that slows down slows both and the
    ratio stays; the median shrugs off the pair that another process fell into. Percentile bootstrap of the
    median (Efron, 1979), with a generator of its own: no global random state is drawn from.

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

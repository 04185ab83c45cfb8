"""Gain from a number of pairs that is fixed before the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from flatout.report.model import Gain

T_QUANTILES = {
    2: 12.71,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
    11: 2.228,
    12: 2.201,
}
"""0.975 quantile of Student's t distribution for a number of pairs, which has one degree of freedom less."""


def fixed_gain(differences: Sequence[float]) -> Gain:
    """Return the geometric mean of paired ratios with its 95 % t interval.

    The interval is valid only if nothing in the pairs decided when to stop.

    Args:
        differences: log ratio of baseline time to candidate time, one per pair, at most 12.

    Raises:
        ValueError: fewer than two pairs, or more than 12.
    """
    pairs = len(differences)
    if pairs not in T_QUANTILES:
        raise ValueError(f"differences must have 2 to {max(T_QUANTILES)} pairs, got {pairs}")
    half = T_QUANTILES[pairs] * stdev(differences) / math.sqrt(pairs)
    mean = fmean(differences)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

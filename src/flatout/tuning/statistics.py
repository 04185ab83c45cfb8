"""Gain from a number of pairs that is fixed in advance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from flatout.core.student import t_quantile
from flatout.report.model import Gain
from flatout.tuning.sequence import UNKNOWN_NOISE, NoiseFloor

MUCH_NOISIER = 1.5
"""Ratio of the spread of pairs to the noise floor above which the floor no longer describes the machine."""


def fixed_gain(differences: Sequence[float], floor: NoiseFloor = UNKNOWN_NOISE) -> Gain:
    """Return the geometric mean of paired ratios with its 95 % t interval.

    The interval is valid only if the measured times do not determine the number of pairs. The noise floor adds its
    degrees of freedom, unless the pairs are much noisier. The scale is never below the spread of the pairs, nor below
    the scale that is pooled from pairs and noise floor. So a few pairs that agree by chance, or that miss rare pauses,
    do not give a narrow interval.

    Args:
        differences: log ratio of baseline time to candidate time, one per pair.
        floor: spread of the same statistic, for pairs of the baseline with itself.

    Raises:
        ValueError: there are fewer than two pairs.
    """
    pairs = len(differences)
    if pairs < 2:
        raise ValueError(f"differences must have at least 2 pairs, got {pairs}")
    spread, freedom = stdev(differences), pairs - 1
    scale = spread
    if spread <= MUCH_NOISIER * floor.scale:
        squares = freedom * spread**2 + floor.pairs * floor.scale**2
        freedom += floor.pairs
        scale = max(spread, math.sqrt(squares / freedom))
    half = t_quantile(freedom) * scale / math.sqrt(pairs)
    mean = fmean(differences)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

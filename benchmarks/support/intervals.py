"""Intervals of ratios between loops that took turns."""

from __future__ import annotations

import math
import statistics

from scipy.stats import t
from support.turns import Rates

from flatout.report.model import Gain


def gain(rates: Rates, one: str, other: str) -> Gain:
    """Return the speed of ``one`` relative to ``other``: the geometric mean over rounds, with its 95 % t interval.

    Raises:
        statistics.StatisticsError: there are fewer than two rounds.
    """
    logs = [math.log(a / b) for a, b in zip(rates[one], rates[other], strict=True)]
    mean = statistics.fmean(logs)
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

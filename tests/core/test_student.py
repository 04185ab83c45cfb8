"""Quantiles of Student's t distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flatout.report.estimates import T_QUANTILES, t_quantile


@pytest.mark.parametrize("freedom", range(1, len(T_QUANTILES) + 1))
def test_quantiles_are_those_of_the_t_distribution(freedom: int) -> None:
    angles = np.linspace(0.0, math.pi / 2, 100_001)  # angles of x = sqrt(freedom) * tan(angle)
    density = np.cos(angles) ** (freedom - 1)
    inside = density[angles < math.atan(t_quantile(freedom) / math.sqrt(freedom))].sum() / density.sum()
    assert inside == pytest.approx(0.95, abs=1e-4)


def test_degrees_of_freedom_are_rounded_down_within_the_table() -> None:
    assert t_quantile(2.99) == T_QUANTILES[1]
    assert t_quantile(math.inf) == T_QUANTILES[-1]
    assert t_quantile(1 - 1e-12) == T_QUANTILES[0]

"""Quantiles of Student's t distribution."""

from __future__ import annotations

T_QUANTILES = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
)
"""0.975 quantiles of Student's t distribution with 1 to 19 degrees of freedom. More degrees use the last quantile."""


def t_quantile(freedom: float) -> float:
    """Return the 0.975 quantile for ``freedom`` degrees of freedom, rounded down, and at least 1."""
    return T_QUANTILES[max(1, int(min(freedom, len(T_QUANTILES)))) - 1]

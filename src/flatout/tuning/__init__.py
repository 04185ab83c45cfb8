"""Measuring without leaving a trace: snapshots, paired trials, equivalence of training."""

from flatout.measure.state import State
from flatout.measure.statistics import paired_gain

__all__ = ["State", "paired_gain"]

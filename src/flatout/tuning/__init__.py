"""Measuring without leaving a trace: snapshots, paired trials, equivalence of training."""

from flatout.core.snapshot import State
from flatout.tuning.statistics import paired_gain

__all__ = ["State", "paired_gain"]

"""Measuring without leaving a trace: snapshots, paired trials, equivalence of training."""

from flatout.core.snapshot import Snapshot
from flatout.tuning.statistics import paired_gain

__all__ = ["Snapshot", "paired_gain"]

"""Training that goes on where a step runs out of memory: the same samples, in smaller parts."""

from flatout.recovery.recovery import LossWeight, Recovery, part_sizes

__all__ = ["LossWeight", "Recovery", "part_sizes"]

"""Training that goes on where a step runs out of memory: the same samples, in smaller parts."""

from flatout.recovery.recovery import Recovery

__all__ = ["Recovery"]

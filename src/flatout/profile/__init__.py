"""Where the time of training steps goes: by part, operator and line of code; why a GPU idles; what to do about it.

``run.profile()`` profiles a run, ``flatout profile train.py`` any training script.
"""

from flatout.profile.loop import profile_run
from flatout.profile.summary import Gaps, Memory, Operator, Profile, Step, Sync

__all__ = ["Gaps", "Memory", "Operator", "Profile", "Step", "Sync", "profile_run"]

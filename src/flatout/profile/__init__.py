"""Profiler of training steps: time by phase and operator, lines that wait for the GPU, peak memory, and advice.

``run.profile()`` profiles a run, ``flatout profile train.py`` any training script. ``record`` runs the steps of a loop,
``script`` those of a script: some are searched for sync points (``syncs``, ``places``), some are timed without the
profiler (``phase_timer``), and some run under torch's profiler. ``shown_profile`` shows the result, with ``advice``.
"""

from flatout.profile.profile_data import Operator, Step, Sync
from flatout.profile.record import profile_run
from flatout.profile.shown_profile import Profile

__all__ = ["Operator", "Profile", "Step", "Sync", "profile_run"]

"""Profiler of training steps: time by part, operator and line of code, causes of GPU idle time, and advice.

``run.profile()`` profiles a run, ``flatout profile train.py`` any training script. Data flows in one direction::

    record    steps of a loop (record) or of a script (script): a search for syncs (syncs), times without the profiler
              (phase_timer), a Chrome trace
      trace   its events, launches and lines of code (trace, places), and the parts of a step (parts)
    summary   a Profile (shown_profile, profile_data) of the times and the trace (gaps, operators, memory_timeline),
              with advice (advice, in_use)
    sections  its tables and texts, for the terminal (profile_text) and as a page (profile_page)

``nsight`` builds command lines for measurements that require NVIDIA's tools.
"""

from flatout.profile.profile_data import Gaps, Memory, Operator, Step, Sync
from flatout.profile.record import profile_run
from flatout.profile.shown_profile import Profile

__all__ = ["Gaps", "Memory", "Operator", "Profile", "Step", "Sync", "profile_run"]

"""Where the time of training steps goes: by part, operator and line of code; why a GPU idles; what to do about it.

``run.profile()`` profiles a run, ``flatout profile train.py`` any training script. Data flows in one direction::

    record    steps of a loop (record) or of a script (script): a search for syncs (syncs), times without the profiler
              (phase_timer), a Chrome trace
      trace   its events, launches and lines of code (trace, places), and the parts of a step (parts)
    summary   a Profile (shown_profile, profile_data) of the times and the trace (gaps, operators, memory), and what to
              do (advice, in_use)
    sections  its tables and texts, for the terminal (profile_text) and as a page (profile_page)

``nsight`` has command lines for measurements that need NVIDIA's tools.
"""

from flatout.profile.profile_data import Gaps, Memory, Operator, Step, Sync
from flatout.profile.record import profile_run
from flatout.profile.shown_profile import Profile

__all__ = ["Gaps", "Memory", "Operator", "Profile", "Step", "Sync", "profile_run"]

"""Count of the code that ``torch.compile`` has made in this process, without what flatout has compiled itself.

Compiled code checks the number of threads, TF32, autocast and the strides of weights at each call (torch 2.14). After
a change of one of them, torch compiles the code again.
"""

from __future__ import annotations

import sys

COLD_COMPILE_SECONDS = 30.0
"""Seconds of the first forward and backward of small models with an empty cache, on two cores: 28 to 35 s."""

_own = 0


def compiled_frames() -> int:
    """Return the number of frames that Dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["total"]


def count_as_own(frames: int) -> None:
    """Count frames as compiled by flatout, so that ``script_compiles`` leaves them out."""
    global _own
    _own += frames


def script_compiles() -> bool:
    """Return True if code of the script is compiled, for example its model, its loss or its step."""
    return compiled_frames() > _own


def recompilation_seconds() -> float:
    """Return the estimated seconds to compile the existing code again, by the time of its first compilation."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent = 0.0 if dynamo is None else dynamo.calculate_time_spent().get("total_wall_time", 0.0)
    return max(COLD_COMPILE_SECONDS, spent)

"""Startup code of Python, which gives flatout's classes to processes that a test spawns."""

import os
import sys

if os.environ.get("FLATOUT_IN_PLACE") and any("multiprocessing.spawn" in word for word in sys.orig_argv):
    import flatout_in_place  # noqa: F401

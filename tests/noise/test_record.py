"""Recorder of step times, and its busy processes."""

from __future__ import annotations

import subprocess
import sys

from tests.noise.record import SPIN

PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], str(os.getpid())])
os.kill(os.getpid(), 9)
"""


def test_a_busy_process_ends_with_a_killed_parent() -> None:
    """The output pipe ends only when the last process that inherited the pipe has ended."""
    done = subprocess.run([sys.executable, "-c", PARENT, SPIN], capture_output=True, timeout=60)
    assert done.returncode == -9
    assert done.stderr == b""

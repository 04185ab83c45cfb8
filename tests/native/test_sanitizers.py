"""The C++ of prefetcher and step timer under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
@pytest.mark.parametrize("part", ["prefetch", "step_timer"])
def test_sanitizers_find_nothing(sanitizers, part):
    done = subprocess.run([ROOT / "tools/tsan.sh", sanitizers, part], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr[-4000:]

"""The C++ of prefetcher and step timer under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZERS = ["thread", "address,undefined"]
PARTS = ["prefetch", "step_timer"]


@pytest.fixture(scope="module")
def started() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """Start all programs at the same time, because compilation and most programs use one core each."""
    every = [(sanitizers, part) for part in PARTS for sanitizers in SANITIZERS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = {one: subprocess.Popen([ROOT / "tools/tsan.sh", *one], **pipes) for one in every}
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizers", SANITIZERS)
@pytest.mark.parametrize("part", PARTS)
def test_sanitizers_find_nothing(started, sanitizers, part):
    process = started[sanitizers, part]
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, out.splitlines()[-1:]) == (0, ["ok"]), errors[-4000:]

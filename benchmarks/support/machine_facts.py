"""Facts that a figure must be read with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.loops import DEVICE

from flatout.core.machine import cpu_name
from flatout.report.environment import environment_of


def machine_facts() -> dict[str, str]:
    """Return processor, cores, versions and the commit of this checkout."""
    return {"processor": cpu_name(), **environment_of(DEVICE), "commit": commit_of(Path(__file__).parent)}


def commit_of(folder: Path) -> str:
    """Return the commit of the checkout that holds a folder; "+" after it stands for changed files."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()

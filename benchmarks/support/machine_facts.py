"""Facts about the machine and the software that belong to every figure."""

from __future__ import annotations

import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch
from support.loops import DEVICE

from flatout.core.machine import cpu_name, usable_cores


def machine() -> str:
    """Return the processor, the cores and the GPU of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    # Virtual machines often report a name without a generation, so the family and the model belong to the name.
    numbers = re.findall(r"^(?:cpu family|model)\s*: (\d+)$", text, re.MULTILINE)[:2]
    model = f" (family {numbers[0]}, model {numbers[1]})" if len(numbers) == 2 else ""
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    name = re.sub(r"\((R|TM)\)", "", cpu_name())
    return f"{name}{model}, {usable_cores()} cores, {gpu}"


def software() -> dict[str, str]:
    """Return the date (UTC), and the versions of the software that is measured."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit_of(Path(__file__).parent),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit_of(folder: Path) -> str:
    """Return the commit of the checkout that contains a folder. A trailing "+" means that files have changed."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()

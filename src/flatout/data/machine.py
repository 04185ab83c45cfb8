"""What this process may use of the machine: cores and memory, a container's limits included."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Physical cores that this process may keep busy: its affinity, and the CPU quota of its container, respected."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, math.ceil(min(len(cores), _quota())))


def _siblings(cpu: int) -> str:
    """What two hardware threads of one core have in common."""
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> float:
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # control groups, version 1
            quota, period = ((_CGROUP / f"cpu/cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def available_memory() -> int:
    """Bytes that a process can still take without swapping, a container's limit included."""
    available = _meminfo_available()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no control groups, or an older version of them
    return available


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # "kB" there means KiB
    except (OSError, ValueError):
        pass  # not Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_shared_memory() -> float:
    """Bytes left in /dev/shm, through which worker processes send tensors; infinite where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return math.inf
    return found.f_bavail * found.f_frsize

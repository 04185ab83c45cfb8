"""What this process may use of the machine: cores and memory, a container's limits included."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")


def usable_cores() -> int:
    """Physical cores that this process may keep busy: its affinity, and the CPU quota of its container, respected."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, math.ceil(min([len(cores), *map(quota_of, control_groups("cpu"))])))


def _siblings(cpu: int) -> str:
    """What two hardware threads of one core have in common."""
    return text_of(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def quota_of(group: Path) -> float:
    """Cores' worth of time that a control group may use, of either version of control groups."""
    quota, _, period = text_of(group / "cpu.max").partition(" ")
    quota = quota or text_of(group / "cpu.cfs_quota_us")
    period = period or text_of(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf


def control_groups(controller: str) -> Iterator[Path]:
    """Directories of the control group of this process and of all that contain it: each of them may set a limit."""
    root = _CGROUP / controller if (_CGROUP / controller).is_dir() else _CGROUP
    paths: dict[str, str] = {}
    for line in text_of(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= {name: path.lstrip("/") for name in controllers.split(",")}
    own = root / (paths.get(controller) or paths.get("", ""))
    yield from (group for group in (own, *own.parents) if root in (group, *group.parents))


def wanted_core_seconds() -> float:
    """Seconds for which this thread has had a core or waited for one that others had: all but sleep and waits."""
    ran_and_waited = text_of(_PROC / "thread-self/schedstat").split()[:2]
    return sum(map(int, ran_and_waited)) / 1e9 if ran_and_waited else time.thread_time()


def used_seconds(group: Path) -> float:
    """CPU seconds that a control group of ``control_groups("cpu")`` has used.

    Raises:
        OSError: the system does not tell.
    """
    if micro := field_of(group / "cpu.stat", "usage_usec"):
        return micro / 1e6
    # Version 1 may keep the accounts in a tree of their own, of the same shape.
    accounts = dict(zip(control_groups("cpu"), control_groups("cpuacct"), strict=False))
    for folder in (group, accounts.get(group, group)):
        nano = text_of(folder / "cpuacct.usage")
        if nano.isdigit():
            return int(nano) / 1e9
    raise OSError("the container does not tell its CPU time")


def available_memory() -> int:
    """Bytes that a process can still take without swapping, a container's limit included."""
    return min([_meminfo_available(), *(limit - used for limit, used in _memory_limits())])


def total_memory() -> int:
    """Bytes that the machine has, or the container's limit where that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _memory_limits())])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limit of each control group that has one, and bytes used of it; files that were read give way, and are not."""
    versions = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for group in control_groups("memory"):
        for names in versions:
            limit, usage = text_of(group / names[0]), text_of(group / names[1])
            if limit.isdigit() and usage.isdigit():
                used = max(0, int(usage) - field_of(group / "memory.stat", names[2]))
                yield int(limit), min(used, int(limit))


def _meminfo_available() -> int:
    kibibytes = field_of(_PROC / "meminfo", "MemAvailable:")  # written as "kB"
    return kibibytes * 1024 or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def swap() -> tuple[int, int]:
    """Bytes of the machine's swap in use, and in all."""
    total, free = (1024 * field_of(_PROC / "meminfo", name) for name in ("SwapTotal:", "SwapFree:"))
    return total - free, total


def private_memory(pid: int) -> int:
    """Bytes that a process shares with no other; 0 where that cannot be known."""
    smaps = _PROC / f"{pid}/smaps_rollup"
    return 1024 * (field_of(smaps, "Private_Clean:") + field_of(smaps, "Private_Dirty:"))


def free_shared_memory() -> float:
    """Bytes left in /dev/shm, through which worker processes send tensors; infinite where there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return math.inf
    return found.f_bavail * found.f_frsize


def field_of(file: Path, name: str) -> int:
    """The number behind a name in a file of one such pair a line; 0 without it."""
    for line in text_of(file).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def text_of(file: Path) -> str:
    """What a small file says; nothing where it is not to be had."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""

"""Cores and memory that this process may use, with the limits of a container, and the environment of figures."""

from __future__ import annotations

import functools
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from flatout.core.version import __version__

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")


def usable_cores() -> int:
    """Return the number of physical cores that the process may use, within its affinity and its container's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, math.ceil(min([len(cores), *map(quota_of, control_groups("cpu"))])))


def local_ranks() -> int:
    """Return the number of ranks that a launcher such as ``torchrun`` has started on this machine, or 1 without one."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdecimal() else 1


def own_cores() -> int:
    """Return this rank's equal share of the usable cores of this machine, at least 1."""
    return max(1, usable_cores() // local_ranks())


@functools.cache
def copy_threads() -> int:
    """Return the number of threads that copy batches in memory.

    The number is half of this rank's cores, at least 1 and at most 4. The first result is cached, because each epoch
    needs the number, and finding the cores reads a file per CPU.
    """
    return min(4, max(1, own_cores() // 2))


def cpu_name() -> str:
    """Return the processor's model name, or its architecture if the system reports no name."""
    lines = text_of(_PROC / "cpuinfo").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _siblings(cpu: int) -> str:
    """Return a text that the hardware threads of one core share."""
    return text_of(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def quota_of(group: Path) -> float:
    """Return the number of cores that a control group may use, for both versions of control groups."""
    quota, _, period = text_of(group / "cpu.max").partition(" ")
    quota = quota or text_of(group / "cpu.cfs_quota_us")
    period = period or text_of(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group and of its parents. Each of them may set a limit."""
    root = _CGROUP / controller if (_CGROUP / controller).is_dir() else _CGROUP
    paths: dict[str, str] = {}
    for line in text_of(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= {name: path.lstrip("/") for name in controllers.split(",")}
    own = root / (paths.get(controller) or paths.get("", ""))
    yield from (group for group in (own, *own.parents) if root in (group, *group.parents))


def load_average() -> float | None:
    """Return the number of processes that ran or waited for a core, averaged over a minute, or None if unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def wanted_core_seconds() -> float:
    """Return the seconds in which this thread ran or waited for a core. Sleep and other waits do not count."""
    ran_and_waited = text_of(_PROC / "thread-self/schedstat").split()[:2]
    return sum(map(int, ran_and_waited)) / 1e9 if ran_and_waited else time.thread_time()


def available_memory() -> int:
    """Return the bytes that a process can still allocate without swapping, within the container's limit."""
    return min([_meminfo_available(), *(limit - used for limit, used in _memory_limits())])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that has one, and its used bytes without reclaimable file cache."""
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


def private_memory(pid: int) -> int:
    """Return the bytes that a process does not share with others, or 0 if unknown."""
    smaps = _PROC / f"{pid}/smaps_rollup"
    return 1024 * (field_of(smaps, "Private_Clean:") + field_of(smaps, "Private_Dirty:"))


def free_shared_memory() -> float:
    """Return the free bytes of /dev/shm, through which worker processes send tensors. Infinite without /dev/shm."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return math.inf
    return found.f_bavail * found.f_frsize


def field_of(file: Path, name: str) -> int:
    """Return the number after ``name`` in a file with one name and number per line, or 0 without this name."""
    for line in text_of(file).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def text_of(file: Path) -> str:
    """Return the text of a small file, or an empty text if the file cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def environment_of(device: torch.device) -> dict[str, str]:
    """Return the environment of figures that are measured on ``device``, fact by name."""
    if device.type == "cuda":
        cudnn = str(torch.backends.cudnn.version())
        gpu = {"cpu": cpu_name(), "cuda": str(torch.version.cuda), "cudnn": cudnn}
    else:
        gpu = {}
    return {
        "device": f"{device.type} ({torch.cuda.get_device_name(device) if gpu else cpu_name()})",
        **gpu,
        "cores": str(usable_cores()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "flatout": __version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }

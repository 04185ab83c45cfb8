"""CPU, memory, disks and processes, from psutil or from the system's own files."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flatout.core import machine
from flatout.monitor.reasons import reason
from flatout.monitor.sample import HostSample, ProcessSample

try:
    import psutil
except ImportError:
    psutil = None

NOT_INSTALLED = "psutil is not installed: pip install 'flatout[monitor]'"
BUSIEST = 12
"""Largest number of processes in a sample of a whole machine."""

_USS_SHARE = 0.01  # share of time for look-ups of unique memory, for which the system walks all pages of a process


class CounterRates:
    """Rates of counters that only rise, per second since the last sample."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def per_second(self, name: str, counter: float, now: float) -> float | None:
        """Return the rate, or None for the first sample, after a reset of the counter, or if no time has passed."""
        before, self._last[name] = self._last.get(name), (counter, now)
        if before is None or now <= before[1] or counter < before[0]:
            return None
        return (counter - before[0]) / (now - before[1])

    def forget_before(self, now: float) -> None:
        """Drop the counters of ended processes, whose last sample is older."""
        self._last = {name: last for name, last in self._last.items() if last[1] >= now}


class Host:
    """Sampler of CPU, memory, swap, shared memory, disks and network."""

    def __init__(self) -> None:
        self._rates = CounterRates()

    def sample(self) -> HostSample:
        """Take one sample without raising."""
        missing: dict[str, str] = {}
        found: dict[str, Any] = {}
        now = time.monotonic()

        def read(query: Callable[[], dict[str, Any]], *fields: str) -> None:
            try:
                found.update(query())
            except Exception as error:  # no such file, no permission, no such counter on this system
                missing.update(dict.fromkeys(fields, reason(error)))

        read(_memory, "ram_used_bytes", "ram_available_bytes", "ram_total_bytes")
        read(_shared_memory, "shm_used_bytes", "shm_total_bytes")
        read(lambda: {"load": os.getloadavg()[0]}, "load")
        read(lambda: self._cpu(now), "cpu_percent", "per_cpu_percent")
        read(lambda: {"swap_used_bytes": _psutil().swap_memory().used}, "swap_used_bytes")
        read(lambda: self._disks(now), "disk_read_bytes_per_second", "disk_write_bytes_per_second")
        read(lambda: self._network(now), "network_received_bytes_per_second", "network_sent_bytes_per_second")
        return HostSample(cores=machine.usable_cores(), **found, missing=missing)

    def _cpu(self, now: float) -> dict[str, Any]:
        """Return the CPU use as a share of the usable logical CPUs, or of a smaller container quota."""
        group, quota = _quota()
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        percents = []
        for cpu, times in enumerate(_psutil().cpu_times(percpu=True)):
            idle = times.idle + getattr(times, "iowait", 0.0)
            busy = self._rates.per_second(f"cpu {cpu}", sum(times[:8]) - idle, now)  # user time includes guests
            if cpu in allowed and busy is not None:
                percents.append(min(100.0, 100 * busy))
        total = sum(percents) / len(percents) if percents else None
        if group is not None and quota < len(allowed):
            used = self._rates.per_second("quota", machine.used_seconds(group), now)
            total = None if used is None else min(100.0, 100 * used / quota)
        return {"cpu_percent": total, "per_cpu_percent": tuple(percents) or None}

    def _disks(self, now: float) -> dict[str, Any]:
        counters = _psutil().disk_io_counters()
        if counters is None:
            raise OSError("the system shows no disks")
        return {
            "disk_read_bytes_per_second": self._rates.per_second("read", counters.read_bytes, now),
            "disk_write_bytes_per_second": self._rates.per_second("written", counters.write_bytes, now),
        }

    def _network(self, now: float) -> dict[str, Any]:
        counters = _psutil().net_io_counters()
        if counters is None:
            raise OSError("the system shows no network")
        return {
            "network_received_bytes_per_second": self._rates.per_second("received", counters.bytes_recv, now),
            "network_sent_bytes_per_second": self._rates.per_second("sent", counters.bytes_sent, now),
        }


class Processes:
    """Samples of a process and its descendants, or of the machine's busiest processes."""

    def __init__(self, pid: int | None) -> None:
        """Start watching.

        Args:
            pid: process at the root; None watches the machine.
        """
        self._pid = pid
        self._uss: dict[int, int | None] = {}
        self._next_uss = -math.inf
        self._rates = CounterRates()
        self._root = None
        self._ended = False
        if psutil is not None and pid is not None:
            with suppress(psutil.Error, OSError):
                self._root = psutil.Process(pid)

    def sample(self) -> tuple[tuple[ProcessSample, ...], bool]:
        """Return the processes, and True if the root has ended. Never raise.

        The root is first. The other processes follow in order of CPU use, the busiest first.
        """
        if psutil is None or self._ended:
            return (), self._ended or not (self._pid is None or exists(self._pid))
        if self._pid is not None and not self._alive():
            self._ended = True
            return (), True
        now = time.monotonic()
        found = [sample for process in self._members() if (sample := self._one(process, now)) is not None]
        self._rates.forget_before(now)
        found.sort(key=lambda one: (one.pid != self._pid, -(one.cpu_percent or 0.0), one.pid))
        if self._pid is None:
            found = [one for one in found if one.rss_bytes][:BUSIEST]  # the kernel's own threads have no memory
        return tuple(found), False

    def _alive(self) -> bool:
        try:
            if self._root is not None:
                return bool(self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False
        except (psutil.Error, OSError):  # the process is not readable, or no file descriptor is left
            pass
        return self._pid is not None and exists(self._pid)

    def _members(self) -> list[Any]:
        try:
            if self._pid is None:
                return list(psutil.process_iter())
            if self._root is None:  # the process belongs to another user, and is hidden from this user
                return []
            members = [self._root, *self._root.children(recursive=True)]
        except (psutil.Error, OSError):
            members = [] if self._root is None else [self._root]
        if members:
            self._look_up_one_uss([process.pid for process in members])
        return members

    def _look_up_one_uss(self, pids: list[int]) -> None:
        """Look up the unique memory of the next process, unless the last look-up is too recent for its cost."""
        self._uss = {pid: uss for pid, uss in self._uss.items() if pid in pids}
        begun = time.monotonic()
        if begun < self._next_uss:
            return
        pid = next((pid for pid in pids if pid not in self._uss), next(iter(self._uss), pids[0]))
        self._uss.pop(pid, None)  # to the end of the queue
        self._uss[pid] = machine.private_memory(pid) or None
        self._next_uss = begun + (time.monotonic() - begun) / _USS_SHARE

    def _one(self, process: Any, now: float) -> ProcessSample | None:
        try:
            with process.oneshot():
                times = process.cpu_times()
                seconds = self._rates.per_second(
                    f"{process.pid} {process.create_time()}", times.user + times.system, now
                )
                return ProcessSample(
                    pid=process.pid,
                    parent_pid=process.ppid(),
                    name=process.name(),
                    cpu_percent=None if seconds is None else 100 * seconds,
                    rss_bytes=process.memory_info().rss,
                    uss_bytes=self._uss.get(process.pid),
                )
        except (psutil.Error, OSError):  # the process ended, is not readable, or no file descriptor is left
            return None


def _psutil() -> Any:
    if psutil is None:
        raise ImportError(NOT_INSTALLED)
    return psutil


def exists(pid: int) -> bool:
    """Return True if a process with this number exists, of any user."""
    if pid <= 0:  # for os.kill, these numbers stand for groups of processes
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process belongs to another user
        return True
    return True


def _memory() -> dict[str, int]:
    total = machine.total_memory()
    available = min(total, machine.available_memory())
    return {"ram_total_bytes": total, "ram_available_bytes": available, "ram_used_bytes": total - available}


def _shared_memory() -> dict[str, int]:
    found = os.statvfs(machine.SHARED_MEMORY)
    total = found.f_blocks * found.f_frsize
    return {"shm_total_bytes": total, "shm_used_bytes": total - found.f_bfree * found.f_frsize}


def _quota() -> tuple[Any, float]:
    """Return the control group with the smallest CPU quota, and the quota in cores; None and infinity without one."""
    groups = [(machine.quota_of(group), group) for group in machine.control_groups("cpu")]
    quota, group = min(groups, key=lambda found: found[0], default=(math.inf, None))
    return (group, quota) if math.isfinite(quota) else (None, math.inf)

"""Fakes of everything that the monitor reads: NVML, DCGM, psutil, the system's files and its clock.

``System`` installs all of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flatout.core import machine
from flatout.monitor import host, nvml
from tests.clock import Clock
from tests.fake_machine import move_paths, put_files
from tests.monitor.fake_dcgm import FakeDcgm
from tests.monitor.fake_nvml import FakeNvml


class System:
    """Fakes for the monitor, installed until the test ends."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._patch, self._root, self._moved = patch, root, False
        for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            patch.delenv(variable, raising=False)

    def nvml(self, **attributes: Any) -> FakeNvml:
        """Install a fake ``pynvml`` with these attributes."""
        fake = FakeNvml(**attributes)
        self._patch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        return fake

    def dcgm(self, **attributes: Any) -> FakeDcgm:
        """Install a fake ``DcgmReader`` with these attributes."""
        fake = FakeDcgm(**attributes)
        self._patch.setitem(sys.modules, "DcgmReader", fake)  # type: ignore[arg-type]
        return fake

    def without(self, *modules: str) -> None:
        """Make the import of these modules fail."""
        for name in modules:
            self._patch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        if "psutil" in modules:
            self._patch.setattr(host, "psutil", None)  # the monitor imports psutil once

    def psutil(self, owner: str = "", **functions: Callable[..., Any]) -> Any:
        """Replace these functions of psutil, or of the class ``owner`` of psutil. Return psutil."""
        psutil = pytest.importorskip("psutil")
        for name, function in functions.items():
            self._patch.setattr(getattr(psutil, owner) if owner else psutil, name, function)
        return psutil

    def cpus(self, *cpus: int) -> None:
        """Restrict this process to these CPUs."""
        self._patch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))

    def files(self, files: Mapping[str, str]) -> None:
        """Write files, by their paths below "/". After the first call the monitor reads no other files."""
        if not self._moved:
            move_paths(self._patch, machine, self._root)
            self._moved = True
        put_files(self._root, files)

    def clock(self) -> Clock:
        """Stop the time. Only the test advances the clock."""
        clock = Clock(tick=0.0)
        self._patch.setattr(time, "monotonic", clock)
        return clock

    def private_memory(self, look: Callable[[int], int]) -> None:
        """Replace the function that reads the private memory of a process."""
        self._patch.setattr(machine, "private_memory", look)

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Change the number of this process inside the block, as in a forked child."""
        with self._patch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            yield


def gpus(*, dcgm: bool = False) -> nvml.Gpus:
    """Return the GPU part of a sampler, without host and processes."""
    return nvml.Gpus(1.0, dcgm=dcgm)


def remembers(root: object, pid: int) -> bool:
    """Return whether any dictionary reachable from an object has a key that begins with this process number.

    No public value shows that the monitor forgets a key, because a key also holds the start time of its process.
    """
    values: list[Any] = [root]
    seen: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            if any(str(key).split()[:1] == [str(pid)] for key in value):
                return True
            values += value.values()
        elif isinstance(value, (list, tuple, set)):
            values += value
        elif hasattr(value, "__dict__"):
            values.append(vars(value))
    return False

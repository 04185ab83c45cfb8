"""What the monitor reads, given by a test: NVML, DCGM, psutil, the system's files and its clock.

Everything that these tests put in another's place is put there by ``System``.
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

from flatout.data import machine
from flatout.monitor import host, nvml
from tests.clock import Clock
from tests.fake_machine import move_paths, put_files
from tests.monitor.fake_dcgm import FakeDcgm
from tests.monitor.fake_nvml import FakeNvml


class System:
    """Puts fakes where the monitor looks, until the test ends."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._patch, self._root, self._moved = patch, root, False
        for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            patch.delenv(variable, raising=False)

    def nvml(self, **attributes: Any) -> FakeNvml:
        """Let ``import pynvml`` find a fake with these attributes."""
        fake = FakeNvml(**attributes)
        self._patch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        return fake

    def dcgm(self, **attributes: Any) -> FakeDcgm:
        """Let ``import DcgmReader`` find a fake with these attributes."""
        fake = FakeDcgm(**attributes)
        self._patch.setitem(sys.modules, "DcgmReader", fake)  # type: ignore[arg-type]
        return fake

    def without(self, *modules: str) -> None:
        """Let these modules be missing."""
        for name in modules:
            self._patch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        if "psutil" in modules:
            self._patch.setattr(host, "psutil", None)  # imported once, with the monitor

    def psutil(self, owner: str = "", **functions: Callable[..., Any]) -> Any:
        """Let these functions of psutil, or of a class of it, do something else; gives psutil."""
        psutil = pytest.importorskip("psutil")
        for name, function in functions.items():
            self._patch.setattr(getattr(psutil, owner) if owner else psutil, name, function)
        return psutil

    def cpus(self, *cpus: int) -> None:
        """Let only these be usable."""
        self._patch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))

    def files(self, files: Mapping[str, str]) -> None:
        """Write files, by their paths below "/". The monitor reads no files but those of all calls."""
        if not self._moved:
            move_paths(self._patch, machine, self._root)
            self._moved = True
        put_files(self._root, files)

    def clock(self) -> Clock:
        """Let time stand still, until the test moves it."""
        clock = Clock(tick=0.0)
        self._patch.setattr(time, "monotonic", clock)
        return clock

    def private_memory(self, look: Callable[[int], int]) -> None:
        """Let the private memory of a process be what ``look`` says; a whole second passes in no other way."""
        self._patch.setattr(machine, "private_memory", look)

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Inside the block this process is its own child, as far as it can tell."""
        with self._patch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            yield


def gpus(*, dcgm: bool = False) -> nvml.Gpus:
    """Return the part of a sampler that asks NVML; a whole one asks for host and processes too."""
    return nvml.Gpus(1.0, dcgm=dcgm)


def remembers(root: object, pid: int) -> bool:
    """Tell whether a dictionary that can be reached from an object has a key that begins with this process's number.

    What is forgotten shows nowhere else: a number that is given to a new process is told apart by its time.
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

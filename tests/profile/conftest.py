"""Fake program and system for a profile."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from flatout.profile import nsight
from tests.fake_machine import move_paths, put_files


class Program:
    """Replaces the program, its module path and the system's limits that a profile reads."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._patch, self._root = patch, root

    def runs(self, *argv: str, module: str | None = None) -> None:
        """Make the process run this script with its arguments. No arguments make it a prompt."""
        main = ModuleType("__main__")
        if argv:
            main.__file__ = argv[0]
        main.__spec__ = ModuleSpec(module, None) if module else None
        self._patch.setitem(sys.modules, "__main__", main)
        self._patch.setattr(sys, "argv", list(argv) or [""])

    def searches(self, *folders: str) -> None:
        """Restrict the module path to these folders."""
        self._patch.setattr(sys, "path", list(folders))

    def may_sample(self, level: str | None) -> None:
        """Set ``perf_event_paranoid``. None removes the file."""
        move_paths(self._patch, nsight, self._root)
        put_files(self._root, {"proc/sys/kernel/perf_event_paranoid": None if level is None else f"{level}\n"})


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    return Program(monkeypatch, tmp_path)

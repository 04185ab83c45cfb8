"""The program and the system that a profile is of."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from flatout.profile import nsight
from tests.fake_machine import move_paths, put_files


class Program:
    """Puts another program, and another system's limits, where a profile looks for them."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._patch, self._root = patch, root

    def runs(self, *argv: str, module: str | None = None) -> None:
        """Let the process run this script, with its arguments; without any it is a prompt."""
        main = ModuleType("__main__")
        if argv:
            main.__file__ = argv[0]
        main.__spec__ = ModuleSpec(module, None) if module else None
        self._patch.setitem(sys.modules, "__main__", main)
        self._patch.setattr(sys, "argv", list(argv) or [""])

    def searches(self, *folders: str) -> None:
        """Let modules be found in these folders alone."""
        self._patch.setattr(sys, "path", list(folders))

    def may_sample(self, level: str | None) -> None:
        """Let ``perf_event_paranoid`` be this; None where the system has no such file."""
        move_paths(self._patch, nsight, self._root)
        put_files(self._root, {"proc/sys/kernel/perf_event_paranoid": None if level is None else f"{level}\n"})


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    return Program(monkeypatch, tmp_path)

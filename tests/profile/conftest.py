"""Fake program for a profile."""

import sys
from types import ModuleType

import pytest


class Program:
    """Replaces the program and its module path, which a profile reads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def runs(self, script: str) -> None:
        """Make the process run this script."""
        main = ModuleType("__main__")
        main.__file__ = script
        self._patch.setitem(sys.modules, "__main__", main)

    def searches(self, *folders: str) -> None:
        """Restrict the module path to these folders."""
        self._patch.setattr(sys, "path", list(folders))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)

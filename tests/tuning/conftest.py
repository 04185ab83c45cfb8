"""Fixtures for tests of measurement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.techniques import Technique


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder of cached plans that belongs to one test."""
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture
def the_only_techniques(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes techniques the only ones of ``optimize``, because no argument adds a technique."""

    def register(*techniques: Technique) -> None:
        for module in (
            "plan",
            "tuning.session",
            "tuning.race",
            "tuning.agenda",
        ):
            monkeypatch.setattr(sys.modules[f"flatout.{module}"], "REGISTRY", techniques)

    return register

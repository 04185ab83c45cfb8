"""Fixtures for tests of measurement."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from flatout.techniques import Technique


@pytest.fixture
def the_only_technique(monkeypatch: pytest.MonkeyPatch) -> Callable[[Technique], None]:
    """Function that makes a technique the only one of ``optimize``, because no argument adds a technique."""

    def register(technique: Technique) -> None:
        for module in ("session", "search"):
            monkeypatch.setattr(sys.modules[f"flatout.tuning.{module}"], "REGISTRY", (technique,))

    return register

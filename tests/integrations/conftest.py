"""Fixtures of all adapters, which check that functions of torch are restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flatout.autotune import module_tuning
from flatout.autotune.auto import Auto
from flatout.autotune.module_tuning import Options
from flatout.integrations import framework_tuning
from flatout.tuning import budget
from tests.integrations.harness import replaced_functions


@pytest.fixture(autouse=True)
def restored_functions() -> Iterator[None]:
    """Check that a test leaves no function of torch replaced."""
    before = replaced_functions()
    yield
    assert replaced_functions() == before


@pytest.fixture(autouse=True)
def long_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first turn come to trials also on a busy machine."""
    for module in (budget, module_tuning):
        monkeypatch.setattr(module, "FIRST_SECONDS", 5.0)


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let adapters tune as ``flatout run --dry-run`` does: trials run, and the training stays as first written."""

    def auto(**options: Any) -> Auto:
        return Auto(Options(**options, is_dry=True))

    monkeypatch.setattr(framework_tuning, "auto", auto)

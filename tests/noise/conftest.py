"""Fixtures for tests on simulated machines."""

from __future__ import annotations

import itertools

import pytest

from flatout.tuning import trial


@pytest.fixture(autouse=True)
def the_same_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pairs be measured in the same random orders, whatever other tests have measured in this process."""
    monkeypatch.setattr(trial, "_seeds", itertools.count())

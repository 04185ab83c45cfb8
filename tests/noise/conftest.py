"""Fixtures for tests on simulated machines."""

from __future__ import annotations

import itertools

import pytest

from flatout.tuning import pairs


@pytest.fixture(autouse=True)
def the_same_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the same random orders of pairs in each test, independent of earlier measurements in this process."""
    monkeypatch.setattr(pairs, "_seeds", itertools.count())

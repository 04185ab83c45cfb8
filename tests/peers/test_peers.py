"""Suites of other projects, with flatout's classes in torch's place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.peers.runner import run
from tests.peers.suites import SUITES, Suite

SOURCES = os.environ.get("FLATOUT_PEERS")


@pytest.mark.slow
@pytest.mark.skipif(SOURCES is None, reason="needs FLATOUT_PEERS, a folder of checkouts: tests/peers/README.md")
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_every_failure_has_a_reason_and_every_reason_a_failure(suite: Suite) -> None:
    sources = Path(SOURCES or "")
    if not suite.found(sources):
        pytest.skip(f"needs {sources / suite.project / suite.folder}: tests/peers/README.md")
    result = run(suite, sources)
    assert result.passed
    assert not [f"{test}\n{result.failed[test]}" for test in result.unexplained]
    assert not result.stale, "these tests no longer fail: remove them from differences.py"

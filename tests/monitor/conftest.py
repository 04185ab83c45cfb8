"""Fake system for the monitor."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.monitor.fake_nvml import FakeNvml
from tests.monitor.harness import System


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> System:
    return System(monkeypatch, tmp_path / "system")


@pytest.fixture
def install(system: System) -> Callable[..., FakeNvml]:
    """Return the function that installs a fake ``pynvml``."""
    return system.nvml

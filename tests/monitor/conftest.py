"""Fake system for the monitor."""

from collections.abc import Callable

import pytest

from tests.monitor.fake_nvml import FakeNvml
from tests.monitor.harness import System


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


@pytest.fixture
def install(system: System) -> Callable[..., FakeNvml]:
    """Return the function that installs a fake ``pynvml``."""
    return system.nvml


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the function that sets environment variables. None leaves a variable as it is."""

    def put(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return put

"""What the tests of step times share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mfu.harness import SimulatedClock, process_in_simulated_time


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Callable[[SimulatedClock], Any]], Any]]:
    """Return the result of a module's function, called where time passes only when its argument says so."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with process_in_simulated_time(tmp_path_factory.mktemp("clock")) as run:
        yield run

"""pytest plugin of flatout: the fixture ``flatout_race``, and a line of the summary for each race.

A package apart from flatout, because pytest imports it in every run, and flatout imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flatout.testing import PairedRace

_PROPERTY = "flatout_race"


@pytest.fixture
def flatout_race(request: pytest.FixtureRequest) -> Callable[..., PairedRace]:
    """Return a function that starts a paired race: ``flatout_race(before, after).at_least(1.2)``.

    The arguments are those of :class:`flatout.testing.PairedRace`.
    """

    def start(before: Callable[[], object], after: Callable[[], object], *, seconds: float = 20.0) -> PairedRace:
        from flatout.testing import PairedRace

        def record(text: str) -> None:
            request.node.user_properties.append((_PROPERTY, text))

        return PairedRace(before, after, seconds=seconds, record=record)

    return start


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the result of each race, of passed, failed and skipped tests alike."""
    races = [
        (report.nodeid, text)
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(outcome)
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == _PROPERTY
    ]
    if races:
        terminalreporter.section("flatout races: speed of after relative to before")
        for test, text in races:
            terminalreporter.write_line(f"{test}: {text}")

"""Options of the suite: ``pytest benchmarks`` runs every claim at a small size, ``--full`` measures and records."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from support import scale
from support.machine_facts import machine
from support.recorded import record

collect_ignore_glob = ["support/*", "results/*"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``."""
    text = "measure at full size, which takes hours, and record the figures in benchmarks/results"
    parser.addoption("--full", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Set the size, and leave out the table of pytest-benchmark, whose seconds are no claim."""
    scale.choose(config.getoption("full"))
    config.option.benchmark_quiet = True


@pytest.fixture(autouse=True, scope="session")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set a cache that stores measured peaks but no plans, so that every loop is tuned from the start.

    A file replaces the folder of plans. Processes that a benchmark starts inherit the setting. Small runs write their
    results to a temporary folder, unless $OUT names one.
    """
    cache = tmp_path_factory.mktemp("cache")
    (cache / "plans").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_CACHE", str(cache))
        if not scale.full and not os.environ.get("OUT"):
            patch.setenv("OUT", str(tmp_path_factory.mktemp("results")))
        yield


@pytest.fixture
def keep(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds figures to those of the test, and records all at once, before the test ends."""

    def keep(figures: dict[str, Any]) -> None:
        benchmark.extra_info.update(figures)
        record(request.path.stem, request.node.name, dict(benchmark.extra_info))

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the figures of a test as soon as it has passed."""
    report = yield
    report.claim = (item.module.__doc__ or "").partition("\n")[0]  # type: ignore[attr-defined]
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if report.when == "call" and report.passed and benchmark is not None and benchmark.extra_info:
        record(item.path.stem, item.name, dict(benchmark.extra_info))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print each claim with the lines that its tests have printed, unless ``-s`` has shown them already."""
    passed = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    if config.getoption("capture") == "no" or not passed:
        return
    terminalreporter.section(f"claims at {'full' if scale.full else 'small'} size")
    terminalreporter.write_line(machine())
    if not scale.full:
        terminalreporter.write_line("These runs are too short for figures. --full measures.")
    shown = ""
    for report in passed:
        file = report.nodeid.partition("::")[0]
        if file != shown:
            shown = file
            terminalreporter.write_line(f"\n{file}", bold=True)
            terminalreporter.write_line(report.claim)
        if report.capstdout:
            terminalreporter.write_line(report.capstdout.strip("\n"))

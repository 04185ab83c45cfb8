"""Runner of a suite with flatout's classes, which reports the result and reason of each test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tests.peers.differences import DIFFERENCES, Difference
from tests.peers.suites import Suite

HERE = Path(__file__).parent
TIMEOUT = 3600  # seconds for one run of a suite


@dataclass(frozen=True)
class Outcome:
    """Result of one test: ``passed``, ``failed`` or ``skipped``, and pytest's message for the latter two."""

    kind: str
    text: str


@dataclass
class Result:
    """Result of a suite.

    Attributes:
        passed: tests that pass with flatout's classes.
        failed: tests that fail with flatout's classes and pass with torch's, and pytest's messages.
        differences: those of ``failed`` that ``differences.py`` explains.
        not_applicable: tests that the suite skips here, or that fail with torch's classes too.
        stale: entries of ``differences.py`` without a test, or with one that passes.
    """

    suite: Suite
    version: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    not_applicable: list[str] = field(default_factory=list)
    stale: list[Difference] = field(default_factory=list)

    @property
    def unexplained(self) -> list[str]:
        """Failures that no entry of ``differences.py`` explains."""
        return [test for test in self.failed if test not in self.differences]


def run(suite: Suite, sources: Path, known: Iterable[Difference] = DIFFERENCES) -> Result:
    """Run a suite with flatout's classes, and run its failures again with torch's classes.

    Args:
        suite: suite with at least one test under ``sources``.
        sources: folder of the checkouts. Its folder ``site``, if any, has packages that the suites import.
        known: differences that explain failures.
    """
    result = Result(suite, suite.version(sources))
    outcomes = _outcomes(suite, sources, suite.found(sources), suite.parts)
    failed = [test for test, outcome in outcomes.items() if outcome.kind == "failed"]
    with_torch = _outcomes(suite, sources, failed, ()) if failed else {}
    known = [difference for difference in known if difference.suite == suite.name]
    for test, outcome in outcomes.items():
        if outcome.kind == "passed":
            result.passed.append(test)
        elif outcome.kind == "skipped" or (test in with_torch and with_torch[test].kind != "passed"):
            result.not_applicable.append(test)
        else:
            result.failed[test] = outcome.text
            reason = next((difference for difference in known if fnmatchcase(test, difference.test)), None)
            if reason is not None:
                result.differences[test] = reason
    for difference in known:
        explained = [test for test in outcomes if fnmatchcase(test, difference.test)]
        if not explained or not set(explained).isdisjoint(result.passed):
            result.stale.append(difference)
    return result


def _outcomes(suite: Suite, sources: Path, tests: Sequence[str], parts: Sequence[str]) -> dict[str, Outcome]:
    checkout = (sources / suite.project).resolve()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes")
        packages = [*(checkout / name for name in suite.packages), HERE / "site", sources.resolve() / "site"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "FLATOUT_IN_PLACE": ",".join(parts),
            "FLATOUT_OUTCOMES": str(file),
            # Tests allow a minute for each spawned process. An import of torch from source files takes as long.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(HERE.parents[1] / "build" / "bytecode"),
        }
        # The settings of the checkout are ignored, because they name plugins that may not be installed.
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", "."]
        command += ["-p", "flatout_in_place", "-p", "no:cacheprovider", "--basetemp", str(Path(folder, "temporary"))]
        command += ["-k", suite.select] if suite.select and parts else []
        ended = subprocess.run(
            [*command, *tests],
            cwd=checkout / suite.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
        if ended.returncode not in (0, 1) or not file.exists():
            raise RuntimeError(f"pytest ended with {ended.returncode} in {suite.name}:\n{ended.stdout[-4000:]}")
        lines = map(json.loads, file.read_text().splitlines())
        outcomes: dict[str, Outcome] = {}
        for test, kind, text in lines:
            if test not in outcomes or kind == "failed":  # a test that passes can fail in its teardown
                outcomes[test] = Outcome(kind, text)
        return outcomes


def table(results: Sequence[Result]) -> str:
    """Return the results as Markdown: the numbers of each suite, then the reason of each difference."""
    lines = ["| suite | version | passed | failed | not applicable |", "|---|---|---:|---:|---:|"]
    for r in results:
        numbers = (len(r.passed), len(r.failed), len(r.not_applicable))
        lines.append(f"| {r.suite.name} | {r.version} | {' | '.join(map(str, numbers))} |")
    reasons = Counter((r.suite.name, difference.reason) for r in results for difference in r.differences.values())
    if reasons:
        lines += ["", "| suite | tests that differ | reason |", "|---|---:|---|"]
        lines += [f"| {suite} | {count} | {reason} |" for (suite, reason), count in reasons.items()]
    return "\n".join(lines)

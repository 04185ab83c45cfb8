"""Make mutants, and run the tests that cover each: ``python -m tests.mutation --help``."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.mutation.mutants import SOURCES, Mutant, Place, find, make

MUTANTS = Path(__file__).with_name("mutants.json")
_TESTS = 60  # the most specific ones that cover a mutant: those that cover the fewest lines
_CPU_SECONDS, _SECONDS = 120, 900  # limits of the tests of one mutant, which may loop or wait for ever


class Covering:
    """Tests by line, from a coverage file with a context per test."""

    def __init__(self, file: str) -> None:
        self._data = CoverageData(file)
        self._data.read()
        self._tests = {
            Path(name).resolve(): self._data.contexts_by_lineno(name) for name in self._data.measured_files()
        }
        self._breadth = Counter(
            context for lines in self._tests.values() for contexts in lines.values() for context in contexts
        )

    def tests(self, place: Place) -> list[str]:
        """Return node ids, the most specific first; for a line that runs at import, of tests that use its file."""
        by_line = self._tests.get(place.file.resolve(), {})
        contexts = {context for line in place.lines for context in by_line.get(line, ())} - {""}
        contexts = contexts or {context for each in by_line.values() for context in each} - {""}
        breadth = Counter[str]()
        for context in contexts:
            breadth[context.partition("|")[0]] += self._breadth[context]
        return sorted(breadth, key=lambda test: (breadth[test], test))[:_TESTS]


def killed(mutant: Mutant, place: Place, tests: list[str]) -> bool:
    """Return whether one of the tests fails with the mutant in the sources."""
    original = place.file.read_bytes()
    pytest_run = None
    try:
        place.file.write_text(place.replaced(mutant.after), encoding="utf-8")
        pytest_run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS)),
        )
        status = pytest_run.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    finally:
        place.file.write_bytes(original)
        if pytest_run is not None:
            with suppress(ProcessLookupError):
                os.killpg(pytest_run.pid, signal.SIGKILL)  # processes that its tests have left, too
    if status == pytest.ExitCode.USAGE_ERROR:  # the mutant breaks imports of conftest, or a test is gone
        subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only", *tests], check=True)
    return status != pytest.ExitCode.OK


def run(output: Path, coverage: str, part: int, parts: int) -> None:
    """Append one line of JSON per mutant to ``output``; mutants that it has already are skipped."""
    if subprocess.run(["git", "diff", "--quiet", "--", SOURCES]).returncode:
        raise SystemExit(f"{SOURCES} has changes that are not committed: mutants are written into it")
    covering = Covering(coverage)
    done = {json.loads(line)["id"] for line in output.read_text().splitlines()} if output.exists() else set()
    mutants = [Mutant(**fields) for fields in json.loads(MUTANTS.read_text(encoding="utf-8"))]
    for number, mutant in enumerate(mutants):
        if number % parts != part or number in done:
            continue
        began = time.monotonic()
        place = find(mutant)
        tests = covering.tests(place) if place else []
        if place is None:
            result = "no place"
        elif not tests:
            result = "not covered"
        else:
            result = "killed" if killed(mutant, place, tests) else "survived"
        line = {"id": number, "result": result, "tests": len(tests), "seconds": round(time.monotonic() - began, 1)}
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, mutant.file, mutant.function, "|", mutant.before, "->", mutant.after, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="draw new mutants from src into mutants.json")
    maker.add_argument("--seed", type=int, default=0)
    runner = commands.add_parser("run", help="write each mutant into src in turn and run the tests that cover it")
    runner.add_argument("output", type=Path, help="file of results, one line of JSON per mutant")
    runner.add_argument("--coverage", default=".coverage", help="made by pytest --cov --cov-context=test")
    runner.add_argument("--part", type=int, default=0)
    runner.add_argument("--parts", type=int, default=1, help="checkouts that share the work")
    options = parser.parse_args()
    if options.command == "make":
        drawn = [asdict(mutant) for mutant in make(options.seed)]
        MUTANTS.write_text(json.dumps(drawn, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(Counter(mutant["subject"] for mutant in drawn))
    else:
        run(options.output, options.coverage, options.part, options.parts)


if __name__ == "__main__":
    main()

"""Make mutants, and run the tests that cover each mutant: ``python -m tests.mutation --help``."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.mutation.mutants import FILE, SOURCES, Mutant, Place, find, make, read

_TESTS = 60  # per mutant: the tests that cover it and the fewest other lines
_CPU_SECONDS, _SECONDS = 120, 900  # limits per mutant, because a mutant may loop or wait forever


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
        """Return node ids, the most specific first. A line that runs at import has the tests that use its file."""
        by_line = self._tests.get(place.file.resolve(), {})
        contexts = {context for line in place.lines for context in by_line.get(line, ())} - {""}
        contexts = contexts or {context for each in by_line.values() for context in each} - {""}
        breadth = Counter[str]()
        for context in contexts:
            breadth[context.rpartition("|")[0]] += self._breadth[context]
        return sorted(breadth, key=lambda test: (breadth[test], test))[:_TESTS]


def outcome(mutant: Mutant, place: Place, tests: list[str]) -> str:
    """Return "killed", "survived" or "timed out": the result of the tests with the mutant in the sources."""
    original = place.file.read_bytes()
    place.file.write_text(place.replaced(mutant.after), encoding="utf-8")
    try:
        status = pytest_status(tests)
    finally:
        place.file.write_bytes(original)
    if status is None:
        return "timed out"
    return "survived" if status == pytest.ExitCode.OK else "killed"


def pytest_status(tests: list[str]) -> int | None:
    """Return the exit status of pytest, or None after the time limit."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS)),
    )
    try:
        status = process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ends processes that tests have started
    return None if status in (-signal.SIGXCPU, -signal.SIGKILL) else status


def run(output: Path, coverage: str, part: int, parts: int) -> None:
    """Append one line of JSON per mutant to ``output``, and skip the mutants that ``output`` has."""
    if subprocess.run(["git", "diff", "--quiet", "--", SOURCES]).returncode:
        raise SystemExit(f"{SOURCES} must have no uncommitted change, because mutants are written there")
    covering = Covering(coverage)
    mutants = read()
    places = find(mutants)
    tests = [covering.tests(place) if place else [] for place in places]
    if not output.exists():
        every = sorted({test for each in tests for test in each})
        if subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *every]).returncode:
            raise SystemExit("tests must pass without a mutant")
        output.touch()
    done = {json.loads(line)["mutant"] for line in output.read_text().splitlines()}
    for number, (mutant, place) in enumerate(zip(mutants, places, strict=True)):
        if number % parts != part or number in done:
            continue
        if place is None:
            result = "no place"
        else:
            result = outcome(mutant, place, tests[number]) if tests[number] else "not covered"
        line = json.dumps({"mutant": number, "result": result})
        with output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, mutant.file, mutant.function, "|", mutant.before, "->", mutant.after, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="draw new mutants from src into mutants.jsonl")
    maker.add_argument("--seed", type=int, default=0)
    runner = commands.add_parser("run", help="write each mutant into src in turn and run the tests that cover it")
    runner.add_argument("output", type=Path, help="file of results, one line of JSON per mutant")
    runner.add_argument("--coverage", default=".coverage", help="made by pytest --cov --cov-context=test")
    runner.add_argument("--part", type=int, default=0)
    runner.add_argument("--parts", type=int, default=1, help="checkouts that share the work")
    options = parser.parse_args()
    if options.command == "make":
        drawn = make(options.seed)
        lines = [json.dumps(asdict(mutant), ensure_ascii=False) + "\n" for mutant in drawn]
        FILE.write_text("".join(lines), encoding="utf-8")
        print(Counter(mutant.subject for mutant in drawn))
    else:
        run(options.output, options.coverage, options.part, options.parts)


if __name__ == "__main__":
    main()

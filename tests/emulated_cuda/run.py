"""Run each test file on the emulated devices in a new process, and print a table of the results.

python -m tests.emulated_cuda.run --build build/emulated --seeds 1 2 3 --orders random lazy

Without files, all tests of tests/gpu and of this folder run. pytest gets all other arguments, such as -k. The argument
--all runs slow tests, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
LIMIT = 600
"""Timeout of a file, in seconds."""


def environment(build: Path, seed: int, order: str) -> dict[str, str]:
    """Return the environment variables of a process with emulated devices.

    Args:
        build: folder of the build with ``FLATOUT_CUDA=EMULATED``.
        seed: seed of the random order of operations, blocks and threads.
        order: when operations run: ``random``, ``lazy`` or ``eager``.
    """
    runtime = build / "tests" / "emulated_cuda"
    return {
        **os.environ,
        "EMULATED_CUDA_BUILD": str(build),
        "EMULATED_CUDA_SEED": str(seed),
        "EMULATED_CUDA_ORDER": order,
        "FLATOUT_FAIL_WITHOUT_GPU": "1",
        "LD_LIBRARY_PATH": os.pathsep.join([str(runtime), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
        "LD_PRELOAD": str(runtime / "libcudart.so.13"),
        "OMP_NUM_THREADS": "1",  # the thread that runs operations would start a second OpenMP pool
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "torch_shim", ROOT / "src", ROOT])),
    }


@dataclass
class Result:
    """Result of one file.

    Attributes:
        file: folder and name of the file.
        counts: number of passed, failed and skipped tests.
        reasons: reasons of skipped tests, with counts.
        seconds: time of the process.
        error: output of the process if a test failed or the process ended early, else empty.
    """

    file: str
    counts: Counter[str]
    reasons: Counter[str]
    seconds: float
    error: str


def run_file(file: Path, variables: dict[str, str], report: Path, arguments: Sequence[str]) -> Result:
    """Run the tests of a file in a new process."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.emulated_cuda.unsupported", "-p", "no:cacheprovider"]
    begun = time.perf_counter()
    try:
        # The emulated runtime may end the process after a message on stderr. pytest's `--capture=fd` would lose the
        # message.
        ended = subprocess.run(
            [*command, "--capture=sys", f"--junitxml={report}", str(file), *arguments],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        status, output = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        status, output = 1, f"{output.decode() if isinstance(output, bytes) else output}\nmore than {LIMIT} s"
    seconds = time.perf_counter() - begun
    counts, reasons = Counter[str](), Counter[str]()
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        skip, has_failed = case.find("skipped"), {"failure", "error"} & {child.tag for child in case}
        counts["failed" if has_failed else "passed" if skip is None else "skipped"] += 1
        if skip is not None:
            reasons[skip.get("message", "")] += 1
    name = Path(*file.resolve().parts[-2:]).as_posix()
    return Result(name, counts, reasons, seconds, output if status else "")


def make_console() -> Console:
    """Return a console with the width of the terminal, or with 120 columns for a log."""
    return Console(width=None if sys.stdout.isatty() else 120)


def table_of(results: Sequence[Result]) -> Table:
    """Return the results as a table."""
    table = Table("file", "passed", "failed", "skipped", "s", "why skipped")
    for each in results:
        why = "\n".join(f"{count} × {reason}" for reason, count in each.reasons.items())
        counts = [str(each.counts[outcome] or "") for outcome in ("passed", "failed", "skipped")]
        table.add_row(each.file, *counts, f"{each.seconds:.0f}", why, style="red" if each.error else "")
    return table


def main() -> int:
    """Run the files, print their results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files at a time")
    parser.add_argument("--orders", choices=["random", "lazy", "eager"], nargs="+", default=["random"])
    parser.add_argument("files", type=Path, nargs="*")
    options, arguments = parser.parse_known_args()
    console, build = make_console(), options.build.resolve()
    files = options.files or sorted([*ROOT.glob("tests/gpu/test_*.py"), *HERE.rglob("test_*.py")])
    has_failed = False
    for seed, order in product(options.seeds, options.orders):
        variables = environment(build, seed, order)
        with ThreadPoolExecutor(options.jobs) as pool:
            jobs = [
                pool.submit(run_file, file, variables, build / f"{file.parent.name}-{file.stem}.xml", arguments)
                for file in files
            ]
            results = [job.result() for job in jobs]
        console.print(f"seed {seed}, {order} order")
        console.print(table_of(results))
        for each in results:
            if each.error:
                has_failed = True
                console.print(each.error, markup=False, highlight=False)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

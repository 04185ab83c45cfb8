"""Command ``flatout demo``: scripts of ``examples``, run as plain PyTorch and through flatout."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flatout.cli.command import Command, CommandError, files_of, write
from flatout.core import formatting
from flatout.report import html
from flatout.report.document import Block, Note, Part, Table
from flatout.report.terminal import show

DESCRIPTION = """\
Runs two scripts of the folder examples, each in three processes, one after the
other: plain PyTorch, through flatout for the first time, and through flatout
again with the plan of the first time. Shows the seconds of each process and of
its training alone, the held-out quality, and flatout's receipt.

  digits   scikit-learn's handwritten digits, a small convolutional network
  gpt      CPython's own reference text, a byte-level GPT"""

EPILOG = """\
examples:
  flatout demo                            both jobs; a few minutes on a laptop
  flatout demo --job digits --quick       a first look
  flatout demo --html demo.html           and a page to keep

On a machine with a GPU, larger models train on the GPU. Plans are stored in a
temporary folder. Other programs on the machine change the seconds."""

EPOCHS = {"digits": 300, "gpt": 12}
"""Epochs of each script: about a minute of plain PyTorch on two cores, with a tenth of this time for tuning."""

SCHEMA_VERSION = 2
"""Version of the demo's JSON form."""

_RESULT = re.compile(r"trained in ([\d.]+) s\n(.*)held-out (.*)\n", re.DOTALL)
"""Last lines of a script: seconds of the training, the receipt, the held-out quality."""


@dataclass(frozen=True)
class Process:
    """Result of one process.

    Attributes:
        title: way of training.
        seconds: duration of the process, with imports, tuning and evaluation.
        training_seconds: duration of the training alone.
        held_out: quality on held-out samples, as the script prints it.
        receipt: report of flatout as text; empty for plain PyTorch.
    """

    title: str
    seconds: float
    training_seconds: float
    held_out: str
    receipt: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout demo``."""
    parser.add_argument("--job", choices=[*EPOCHS, "all"], default="all", help="which job (default: all)")
    parser.add_argument("--quick", action="store_true", help="train for one epoch: a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and receipts as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the output as one self-contained page")


def run(args: argparse.Namespace) -> int:
    """Run ``flatout demo``."""
    files = files_of(args)
    names = list(EPOCHS) if args.job == "all" else [args.job]
    if "digits" in names:
        try:
            import sklearn.datasets  # noqa: F401
        except ImportError as error:
            raise CommandError("the job digits requires scikit-learn: pip install 'flatout[demo]'") from error
    console = Console()
    jobs: dict[str, list[Process]] = {}
    page: list[Block] = []
    for name in names:
        epochs = 1 if args.quick else EPOCHS[name]
        jobs[name] = run_job(name, epochs, console.width)
        shown = [Note(f"{name}.py --epochs {epochs}", "headline"), *blocks(jobs[name])]
        page += shown
        show(shown, console)
    writers = {
        "html": lambda path: path.write_text(html.page("flatout demo", page), encoding="utf-8"),
        "json": lambda path: path.write_text(to_json(jobs), encoding="utf-8"),
    }
    write(files, writers)
    return 0


def run_job(name: str, epochs: int, width: int) -> list[Process]:
    """Run a script as plain PyTorch, through flatout, and again with the cached plan.

    Args:
        name: key in ``EPOCHS``.
        epochs: passes over the training data.
        width: columns of the receipt.

    Returns:
        The three processes in this order.

    Raises:
        CommandError: the script failed.
    """
    script = importlib.util.find_spec(f"flatout.examples.{name}")
    assert script is not None
    assert script.origin is not None
    command = [sys.executable, script.origin, "--epochs", str(epochs)]
    with tempfile.TemporaryDirectory(prefix="flatout-demo-") as cache:
        folders = {"FLATOUT_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        environment = {**os.environ, **folders, "COLUMNS": str(width)}
        return [
            run_process("plain PyTorch", [*command, "--plain"], environment),
            run_process("flatout, first", command, environment),
            run_process("flatout, again", command, environment),
        ]


def run_process(title: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Run a script, show its last line while it runs, and return its result.

    Raises:
        CommandError: the script failed, or printed no result.
    """
    output = ""
    start = time.perf_counter()
    with (
        Console().status(title) as status,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        for line in process.stdout or ():
            output += line
            status.update(Text(f"{title}: {line.strip()}"))
        failed = process.wait()
        seconds = time.perf_counter() - start
        errors.seek(0)
        messages = errors.read().strip().splitlines()
    found = _RESULT.search(output)
    if failed or found is None:
        raise CommandError(f"{shlex.join(command)} failed: {formatting.clean((messages or ['no result'])[-1])}")
    training, receipt, held_out = found.groups()
    return Process(title, seconds, float(training), held_out, receipt.rstrip())


def blocks(processes: Sequence[Process]) -> Iterator[Block]:
    """Yield the processes of a job, the seconds that flatout saved or lost, and the receipt of the first start."""
    rows: list[list[Part]] = []
    plain, *through_flatout = processes
    for each in processes:
        cells: list[Part] = [(each.title, "strong")]
        for seconds, reference in ((each.seconds, plain.seconds), (each.training_seconds, plain.training_seconds)):
            cells += [formatting.seconds(seconds), "" if each is plain else f"{reference / seconds:.2f}×"]
        rows.append([*cells, each.held_out])
    headings = ["", "process", "gain", "training", "gain", "held-out"]
    yield Table(rows, headings, frozenset({1, 2, 3, 4}), is_explained=True)
    yield Note("")
    for each, expense in zip(through_flatout, ("Tuning", "The cached plan"), strict=True):
        saved = plain.seconds - each.seconds
        paid, than = ("paid", "less") if saved > 0 else ("did not pay", "more")
        took = f"{formatting.seconds(abs(saved))} {than} than plain PyTorch"
        yield Note(f"{expense} {paid} in this training: the whole process took {took}.")
    yield Note("")
    yield Note(through_flatout[0].receipt, "pre")
    yield Note("")


def to_json(jobs: Mapping[str, Sequence[Process]]) -> str:
    """Return all figures and receipts as JSON text."""
    data = {"schema": SCHEMA_VERSION, "jobs": {name: list(map(asdict, each)) for name, each in jobs.items()}}
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


COMMAND = Command(
    name="demo",
    help="run two training scripts as plain PyTorch and through flatout",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)

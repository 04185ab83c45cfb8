"""Command ``flatout doctor``: one page of findings on the machine and the install."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.cli.command import Command, CommandError
from flatout.cli.diagnosis import Finding, Verdict, as_dicts, examine
from flatout.cli.files import files_of, write
from flatout.cli.rank_checks import examine_ranks
from flatout.core.formatting import first_line, visible
from flatout.distributed import process_group

DESCRIPTION = """\
Looks at the machine and the install for what keeps training from running
fast: GPU, driver, torch, cuDNN and its flags, TF32, cores and a container's
share of them, memory, /dev/shm, limits, settings left on from debugging.
Each with a verdict, and what to do. Changes nothing."""

EPILOG = """\
examples:
  flatout doctor                       one page, with what to do
  flatout doctor --json                the findings as JSON, instead of the page
  flatout doctor --json findings.json  the page, and a file to keep
  torchrun --nproc-per-node=gpu -m flatout doctor
                                       all ranks, with their connection

The exit status is 1 if something is broken, else 0."""

_LOOKS: dict[Verdict, tuple[str, str, str]] = {
    # verdict: (mark, style, word after a count)
    "broken": ("✗", "bold red", "broken"),
    "slow": ("!", "bold yellow", "slow"),
    "note": ("→", "cyan", "worth knowing"),
    "good": ("✓", "green", "good"),
}
STDOUT = Path("-")
_ASCII = str.maketrans({"✓": "+", "→": ">", "✗": "x"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout doctor``."""
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, type=Path, metavar="FILE", help="write JSON; without FILE: print JSON only"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings. Under ``torchrun``, rank 0 prints for all ranks. Return 1 if something is broken, else 0."""
    files = {} if args.json == STDOUT else files_of(args)
    findings = _findings()
    if process_group.is_launched() and os.environ["RANK"] != "0":
        return _status(findings)
    text = json.dumps(as_dicts(findings), indent=2)
    if args.json == STDOUT:
        print(text)
    else:
        console = Console(highlight=False)
        show(findings, console)
        writers = {"json": lambda path: path.write_text(f"{text}\n", encoding="utf-8")}
        write(files, writers, lambda line: console.print(line, markup=False, soft_wrap=True))
    return _status(findings)


def _findings() -> tuple[Finding, ...]:
    if not process_group.is_launched():
        return examine()
    try:
        return examine_ranks()
    except (RuntimeError, ConnectionError) as error:
        raise CommandError(
            f"all {os.environ['WORLD_SIZE']} ranks must reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, "
            f"got in rank {os.environ['RANK']}: {first_line(error)}"
        ) from error


def _status(findings: Iterable[Finding]) -> int:
    return int(any(finding.verdict == "broken" for finding in findings))


def show(findings: Iterable[Finding], console: Console) -> None:
    """Print the findings as a page on ``console``."""
    findings = tuple(findings)
    plain = console.options.ascii_only
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, expand=False)
    for heading in ("", "topic", "what", "found"):
        table.add_column(heading, no_wrap=heading != "found", overflow="fold")
    topic = ""
    for finding in findings:
        mark, style, _ = _LOOKS[finding.verdict]
        found = Text(visible(finding.found))
        if finding.fix:
            found.append(f"\n{'>' if plain else '→'} {visible(finding.fix)}", style=style)
        table.add_row(
            Text(mark.translate(_ASCII) if plain else mark, style=style),
            Text("" if finding.topic == topic else finding.topic, style="bold"),
            Text(finding.name),
            found,
        )
        topic = finding.topic
    console.print(table)
    console.print()
    counts = Counter(finding.verdict for finding in findings)
    looks = ((counts[verdict], style, word) for verdict, (_, style, word) in _LOOKS.items())
    console.print(Text(", ").join(Text(f"{count} {word}", style=style) for count, style, word in looks if count))


COMMAND = Command(
    name="doctor",
    help="what keeps training on this machine from running fast",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)

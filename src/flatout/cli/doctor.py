"""Command ``flatout doctor``: environment of torch, and findings on what flatout requires."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.utils import collect_env

from flatout.cli.command import Command, CommandError, files_of, write
from flatout.cli.diagnosis import Finding, Verdict, examine
from flatout.cli.rank_checks import examine_ranks
from flatout.core.formatting import first_line, visible
from flatout.distributed import process_group

DESCRIPTION = """\
Shows the output of torch.utils.collect_env, and checks what flatout requires:
CUDA kernels, torch, a compiler for torch.compile, the driver, each GPU and its
data sheet, and /dev/shm. Each finding has a verdict and the fix."""

EPILOG = """\
examples:
  flatout doctor                       the environment, and the findings
  flatout doctor --json                both as JSON, instead of the text
  flatout doctor --json findings.json  the text, and a file to keep
  torchrun --nproc-per-node=gpu -m flatout doctor
                                       the findings on all ranks

The exit status is 1 if something is broken, else 0."""

STDOUT = Path("-")
_STYLES: dict[Verdict, str] = {"broken": "bold red", "slow": "bold yellow", "note": "cyan", "good": "green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout doctor``."""
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, type=Path, metavar="FILE", help="write JSON; without FILE: print JSON only"
    )


def run(args: argparse.Namespace) -> int:
    """Show environment and findings. Under ``torchrun``, rank 0 shows them. Return 1 if something is broken, else 0."""
    files = {} if args.json == STDOUT else files_of(args)
    findings = _findings()
    if process_group.is_launched() and os.environ["RANK"] != "0":
        return 0  # a status of 1 would make torchrun end rank 0
    environment, text = _environment()
    record = {"environment": environment, "findings": [asdict(finding) for finding in findings]}
    record_text = json.dumps(record, indent=2)
    if args.json == STDOUT:
        print(record_text)
    else:
        console = Console(highlight=False)
        console.print(Text(visible(text)), soft_wrap=True)
        console.print()
        show(findings, console)
        writers = {"json": lambda path: path.write_text(f"{record_text}\n", encoding="utf-8")}
        write(files, writers, lambda line: console.print(line, markup=False, soft_wrap=True))
    return int(any(finding.verdict == "broken" for finding in findings))


def _environment() -> tuple[dict[str, Any], str]:
    """Return the environment that torch collects for a bug report, as fields and as text."""
    try:
        found = collect_env.get_env_info()
        return found._asdict(), collect_env.pretty_str(found)
    except Exception as error:  # programs such as pip may answer in an unforeseen form
        return {}, f"torch.utils.collect_env fails: {first_line(error)}"


def _findings() -> tuple[Finding, ...]:
    if not process_group.is_launched():
        return examine()
    try:
        return examine_ranks()
    except (RuntimeError, ConnectionError) as error:
        raise CommandError(
            f"all {os.environ['WORLD_SIZE']} ranks must reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, "
            f"got in rank {os.environ['RANK']}: {first_line(error)}. If the hosts have several networks, set "
            "GLOO_SOCKET_IFNAME to the interface that connects them"
        ) from error


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings as a table on ``console``."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, expand=False)
    for heading in ("verdict", "topic", "what", "found"):
        table.add_column(heading, no_wrap=heading != "found", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        found = Text(visible(finding.found))
        if finding.fix:
            found.append(f"\nfix: {visible(finding.fix)}", style=style)
        table.add_row(Text(finding.verdict, style=style), finding.topic, Text(finding.name), found)
    console.print(table)
    console.print()
    counts = Counter(finding.verdict for finding in findings)
    shown = (Text(f"{counts[verdict]} {verdict}", style) for verdict, style in _STYLES.items() if counts[verdict])
    console.print(Text(", ").join(shown))


COMMAND = Command(
    name="doctor",
    help="show the environment, and what flatout lacks on this machine",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)

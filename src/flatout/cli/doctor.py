"""Command ``flatout doctor``: environment of torch, and findings on what flatout requires."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch.utils import collect_env

from flatout.cli.command import Command, CommandError, files_of, write
from flatout.cli.diagnosis import Finding, Verdict, examine
from flatout.cli.rank_checks import examine_ranks
from flatout.core.formatting import first_line, visible
from flatout.distributed import process_group
from flatout.report.document import Block, Note, Part, Table
from flatout.report.terminal import show

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
_STYLES: dict[Verdict, str] = {"broken": "slower", "slow": "warn", "note": "place", "good": "chosen"}


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
        show(blocks(findings), console)
        writers = {"json": lambda path: path.write_text(f"{record_text}\n", encoding="utf-8")}
        write(files, writers)
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


def blocks(findings: Sequence[Finding]) -> Iterator[Block]:
    """Yield a table of the findings, and their number by verdict."""
    rows: list[list[Part | list[Part]]] = []
    for each in findings:
        style = _STYLES[each.verdict]
        fix: list[Part] = [(f"fix: {each.fix}", style)] if each.fix else []
        rows.append([(each.verdict, style), each.topic, each.name, [each.found, *fix]])
    yield Table(rows, ["verdict", "topic", "what", "found"], is_explained=True)
    counts = Counter(each.verdict for each in findings)
    tally = [(f"{counts[verdict]} {verdict}", style) for verdict, style in _STYLES.items() if counts[verdict]]
    yield Note("")
    yield Note(tally, gap=", ")


COMMAND = Command(
    name="doctor",
    help="show the environment, and what flatout lacks on this machine",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)

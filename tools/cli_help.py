"""Writes the page of the command line from each command's help: ``python tools/cli_help.py docs/reference/cli.md``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from unittest import mock

INTRODUCTION = """# Command line

`flatout COMMAND --help` shows the same texts. `python -m flatout` is the same program.

| command | guide |
|---|---|
| [`run`](#flatout-run), [`advise`](#flatout-advise) | [Unchanged scripts](../guides/unchanged_scripts.md) |
| [`profile`](#flatout-profile), [`monitor`](#flatout-monitor) | [MFU and profiling](../guides/mfu_and_profiling.md) |
| [`compare`](#flatout-compare) | [Reading a receipt](../guides/reading_a_receipt.md#compare-two-reports) |
| [`doctor`](#flatout-doctor) | [Install](../install.md#check-the-machine) |
| [`demo`](#flatout-demo) | two training scripts as plain PyTorch and through flatout |
| [`bench`](#flatout-bench) | [Benchmarks](../benchmarks.md) |
"""


def page() -> str:
    """Return the page."""
    from flatout.cli import build_parser

    with mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}):
        parser = build_parser()
        parts = [INTRODUCTION, _section("flatout", parser)]
        commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parts += [_section(f"flatout {name}", command) for name, command in commands.choices.items()]
    return "\n".join(parts)


def _section(title: str, parser: argparse.ArgumentParser) -> str:
    return f"## {title}\n\n```text\n{parser.format_help()}```\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")

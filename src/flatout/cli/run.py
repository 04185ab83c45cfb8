"""Command ``flatout run``: tuning of an unchanged training script."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from flatout.autotune.engine import Engine
from flatout.autotune.module_tuning import Options
from flatout.autotune.script_report import ScriptReport
from flatout.cli.command import Command, CommandError, add_program, files_of, program_of, write
from flatout.core.formatting import first_line
from flatout.core.standard_error import say
from flatout.plan import Plan
from flatout.training.spec import CACHED
from flatout.tuning.arguments import FORBIDDABLE, budget_of, precision_of
from flatout.tuning.ranks import is_first_rank

DESCRIPTION = """\
Runs a training script as `python train.py` does, and tunes it while it trains:
records two updates, measures each technique on the script's own calls, and
keeps what pays. Tuning takes a second, and after that at most a tenth of the
time that the script has trained. The script, its output and its exit status
stay the same; what flatout says goes to stderr and to two files."""

EPILOG = """\
examples:
  flatout run train.py --epochs 3             flatout's options come first
  flatout run -m package.train --lr 0.1       a module, as for python -m
  flatout run --without compile train.py      all techniques but one
  flatout run --only fused_optimizer train.py this technique alone
  flatout run --dry-run train.py              measure, and keep nothing"""

HTML, JSON = Path("flatout-report.html"), Path("flatout-report.json")


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that choose techniques."""
    parser.add_argument(
        "--only", type=_names, default=[], metavar="NAMES", help="techniques that may be used, with commas"
    )
    parser.add_argument(
        "--without", type=_names, default=[], metavar="NAMES", help="techniques that may not be used, with commas"
    )
    parser.add_argument(
        "--precision",
        type=_precision,
        choices=["auto", "fp32", "tf32", "bf16"],
        default="auto",
        help="of the products of matrices (default: auto, the fastest whose losses match)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout run``."""
    add_choices(parser)
    parser.add_argument(
        "--plan", default=CACHED, metavar="FILE", help="a saved plan; 'none' measures again (default: of earlier runs)"
    )
    parser.add_argument("--deterministic", action="store_true", help="two runs are equal bit for bit")
    parser.add_argument("--dry-run", action="store_true", help="measure, but train as first written")
    parser.add_argument("--html", type=Path, default=HTML, metavar="FILE", help=f"the report (default: {HTML})")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE", help=f"its figures (default: {JSON})")
    add_program(parser)


def run(args: argparse.Namespace) -> int:
    """Run ``flatout run``. Exceptions of the script propagate."""
    program, options, files = program_of(args), options_of(args), files_of(args)  # before the script changes the folder
    process, engine = os.getpid(), Engine(options, say)
    try:
        program.run()
    finally:
        if os.getpid() == process:  # a forked child of the script shows no report
            _end(engine, files)
    return 0


def options_of(args: argparse.Namespace) -> Options:
    """Return the options of the command line, with the plan from its file.

    Raises:
        CommandError: a technique is unknown, the plan cannot be read, or ``FLATOUT_BUDGET`` is not a number >= 0.
    """
    # An unknown name of --only also becomes forbidden, so that Options rejects the name.
    forbidden = {*args.without, *(set(FORBIDDABLE) ^ set(args.only) if args.only else ())}
    try:
        plan = {"none": None, CACHED: CACHED}[args.plan] if args.plan in ("none", CACHED) else Plan.load(args.plan)
    except (OSError, ValueError) as error:
        raise CommandError(f"--plan must be a plan that Plan.save wrote: {first_line(error)}") from error
    try:
        return Options(
            dict.fromkeys(forbidden, False), args.precision, args.deterministic, plan, args.dry_run, budget_of(None)
        )
    except ValueError as error:
        raise CommandError(str(error)) from error


def _end(engine: Engine, files: Mapping[str, Path]) -> None:
    """Stop tuning and show the report. An error of the report must not replace an exception of the script."""
    try:
        engine.close()
        if is_first_rank() and not engine.why_nothing:  # the engine has said the reason
            _show(ScriptReport.of(engine), files)
    except Exception as error:
        say(f"no report can be shown: {first_line(error)}")


def _show(report: ScriptReport, files: Mapping[str, Path]) -> None:
    """Print the results of the tuning, and write the report if a module was tuned."""
    for line in str(report).splitlines():
        say(line)
    if not report.modules:
        return
    try:
        write(files, {"html": report.to_html, "json": report.to_json}, say)
    except CommandError as error:
        say(str(error))


def _precision(text: str) -> str:
    try:
        return precision_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


COMMAND = Command(
    name="run",
    help="any training script, unchanged and faster",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
    runs_program=True,
)

"""Command ``flatout profile``: profile of any training script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from flatout.cli.command import Command, CommandError, add_program, files_of, program_of, write
from flatout.core.formatting import clean
from flatout.profile.record import SEARCHED_STEPS, ProfileRecording
from flatout.profile.script import Ended, run_course

DESCRIPTION = """\
Runs a training script, times some of its updates and profiles some others: time
by phase of the step, the costliest operators, sync points by file and line, the
peak memory, and what to do. The script need not know of flatout. It is ended
when the profile is done, unless --keep-going."""

EPILOG = """\
examples:
  flatout profile train.py --epochs 3            a summary after some 25 updates
  flatout profile -m package.train --lr 0.1      a module, as for python -m
  flatout profile --html profile.html train.py   and a page with a chart
  flatout profile --trace trace.json.gz train.py for https://ui.perfetto.dev

A step is what lies between two updates. After the warm-up, two steps search for
sync points, and some use up what loader workers have in store. Then --steps are
timed without the profiler, and as many run under it. The exit status is that of
the script, or 0 if the profiler ended the script. It is 1 if the script
returned 0, but there is no profile or a file cannot be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``flatout profile``."""
    parser.add_argument(
        "--steps", type=_positive, default=10, metavar="N", help="steps to time, then to profile (default: 10)"
    )
    parser.add_argument("--warmup", type=_positive, default=3, metavar="N", help="updates before (default: 3)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with a chart")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the Chrome trace; compressed for *.gz")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--keep-going", action="store_true", help="let the script run to its own end, unprofiled")
    add_program(parser)


def run(args: argparse.Namespace) -> int:
    """Run ``flatout profile``."""
    program, files = program_of(args), files_of(args)
    least = args.warmup + SEARCHED_STEPS + 1
    print(
        f"flatout: profiling {clean(args.script)}, which must make at least {least} optimizer updates "
        f"({least - 1 + 2 * args.steps} for --steps {args.steps})",
        file=sys.stderr,
        flush=True,
    )
    recording = ProfileRecording(args.steps, args.warmup)
    ended = run_course(program, recording.course(), stop=not args.keep_going)
    if isinstance(ended.error, KeyboardInterrupt):
        raise ended.error
    if ended.error is not None:
        sys.excepthook(type(ended.error), ended.error, ended.error.__traceback__)
    try:
        _show(recording, ended, args, files)
        return ended.status
    except CommandError as error:
        print(f"flatout: {clean(str(error))}", file=sys.stderr)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return ended.status or 1  # the script's exit status takes precedence over flatout's


def _show(recording: ProfileRecording, ended: Ended, args: argparse.Namespace, files: Mapping[str, Path]) -> None:
    """Print the profile and write it to files. An error means that there is no profile, or no file."""
    if ended.failure is not None:
        raise ended.failure
    if recording.timed == 0:
        raise CommandError(
            f"{args.script} ended after {ended.updates} optimizer updates in this process; a profile takes "
            f"{args.warmup + SEARCHED_STEPS + 1} or more, plus one for each batch that loader workers have prefetched "
            f"(--warmup {args.warmup})"
        )
    profile = recording.profile()
    Console().print(profile)
    if profile.profiled_steps < args.steps:
        print(
            f"flatout: {recording.timed} of {args.steps} steps were timed and {profile.profiled_steps} profiled, "
            f"because {clean(args.script)} ended after {ended.updates} optimizer updates",
            file=sys.stderr,
        )
    write(files, {"html": profile.to_html, "trace": profile.to_chrome_trace, "json": profile.to_json})


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


_positive.__name__ = "whole number"  # argparse: "invalid whole number value: 'x'"

COMMAND = Command(
    name="profile",
    help="where the time of any training script goes, and what to do about it",
    description=DESCRIPTION,
    epilog=EPILOG,
    add_arguments=add_arguments,
    run=run,
)

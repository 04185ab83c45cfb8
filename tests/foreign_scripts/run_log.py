"""Command-line arguments and log, shared by the scripts of this folder."""

from __future__ import annotations

import argparse
import json
import time


def arguments(steps: int) -> argparse.Namespace:
    """Return the arguments of the command line.

    Args:
        steps: number of updates without ``--steps``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps, help="number of updates")
    parser.add_argument("--size", choices=["tiny", "real"], default="tiny", help="tiny to test, real to measure")
    args = parser.parse_args()
    args.is_tiny = args.size == "tiny"
    return args


class Log:
    """Losses of the updates, and the times at which they ended."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def note(self, **losses: float) -> None:
        """Record the losses of an update."""
        self.lines.append({"step": len(self.lines), "at": time.perf_counter(), **losses})

    def dump(self) -> None:
        """Print one JSON line for each update."""
        for line in self.lines:
            print(json.dumps(line))

"""Goals and figures of benchmarks/optimize_gpu.py, which are printed, and stored as JSON after every job."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from support.loops import DEVICE

NAME = "optimize_gpu.json"


@dataclass(frozen=True)
class Goal:
    """Goal for a figure, with the measured value.

    Attributes:
        what: name of the figure.
        value: measured value; None if not measured.
        least: the goal.
        percent: True if value and goal are shares, to be printed in percent.
    """

    what: str
    value: float | None
    least: float
    percent: bool = False

    @property
    def met(self) -> bool | None:
        """True if the value reaches the goal; None if nothing was measured."""
        return None if self.value is None else self.value >= self.least

    def __str__(self) -> str:
        verdict = {True: "met", False: "missed", None: "not measured"}[self.met]
        return f"{self.what}: {self._number(self.value)} (goal {self._number(self.least)}: {verdict})"

    def _number(self, value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %" if self.percent else f"{value:,.2f}"


def say(title: str, lines: Sequence[str]) -> None:
    """Print a title and lines."""
    print(f"\n{title}", *filter(None, lines), sep="\n  ", flush=True)


def keep(name: str, figures: dict[str, Any], goals: Sequence[Goal]) -> dict[str, Any]:
    """Write a job's figures and goals to the files, and return the figures with the goals."""
    figures = figures | {"goals": [asdict(goal) | {"met": goal.met} for goal in goals]}
    for path in _paths():
        _write(path, name, figures)
    return figures


def _paths() -> list[Path]:
    """Return the files: one in $OUT if $OUT is set, and on a GPU one beside the other results."""
    paths = [Path(os.environ["OUT"]) / NAME] if os.environ.get("OUT") else []
    return [*paths, Path(__file__).parents[1] / "results" / NAME] if DEVICE.type == "cuda" else paths


def _write(path: Path, name: str, figures: dict[str, Any]) -> None:
    """Replace the figures of a job in a file."""
    known = json.loads(path.read_text()) if path.exists() else {}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = "python -m pytest benchmarks/optimize_gpu.py -s"
    jobs = known.get("jobs", {}) | {name: {"date": date, **figures}}
    path.write_text(json.dumps({"command": command, "jobs": jobs}, indent=1) + "\n")

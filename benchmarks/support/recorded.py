"""Figures of full runs in ``benchmarks/results/<machine>.json``, one file for each machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from support.machine_facts import machine, software

RESULTS = Path(__file__).parents[1] / "results"
DIGITS = 4
"""Decimal places of the numbers in a file."""


def path_of(machine: str) -> Path:
    """Return the file of a machine, in $OUT if $OUT is set."""
    slug = re.sub(r"[^a-z0-9.]+", "-", machine.lower()).strip("-")
    return Path(os.environ.get("OUT") or RESULTS) / f"{slug}.json"


def record(benchmark: str, test: str, figures: dict[str, Any]) -> Path:
    """Write the figures of a test, and keep the figures of all other tests of this machine.

    Args:
        benchmark: name of the benchmark's file, without ``.py``.
        test: name of the test, with its parameters.
        figures: figures that JSON can represent.

    Returns:
        The file. A process that is killed leaves the old file.
    """
    path = path_of(machine())
    content: dict[str, Any] = {"machine": machine(), "benchmarks": {}}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
    entry = content["benchmarks"].setdefault(benchmark, {"results": {}})
    entry["command"] = f"pytest benchmarks/{benchmark}.py --full"
    entry["results"][test] = {**software(), **figures}
    rounded = json.loads(json.dumps(content), parse_float=lambda digits: round(float(digits), DIGITS))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
    return path

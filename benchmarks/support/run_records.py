"""Records of the finished runs of a long benchmark, so that another call continues."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RunRecords:
    """File of runs, in $OUT if $OUT is set, else beside the other results. Numbers have four decimal places.

    Args:
        name: name of the file.
        command: command that measures the runs.
    """

    def __init__(self, name: str, command: str) -> None:
        folder = os.environ.get("OUT")
        self._path = (Path(folder) if folder else Path(__file__).parents[1] / "results") / name
        self._command = command

    def find(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the runs with these values."""
        return [run for run in self._read()["runs"] if fields.items() <= run.items()]

    def add(self, run: dict[str, Any]) -> None:
        """Add a run."""
        content = self._read()
        self._write(content | {"runs": [*content["runs"], run]})

    def common(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value that all runs share. The first run makes the value."""
        content = self._read()
        if name not in content:
            content = {name: make(), **content}
            self._write(content)
        return content[name]

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {"command": self._command, "runs": []}
        return json.loads(self._path.read_text(encoding="utf-8"))

    def _write(self, content: dict[str, Any]) -> None:
        """Replace the file atomically, so that a killed process leaves the old file."""
        rounded = json.loads(json.dumps(content), parse_float=lambda digits: round(float(digits), 4))
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
        new.replace(self._path)

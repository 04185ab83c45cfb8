"""Report on a script, with one report for each tuned module and the time that tuning took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.autotune.engine import Engine
from flatout.core import formatting
from flatout.core.described import Described
from flatout.report import Report, wording
from flatout.report.document import Block, Note
from flatout.report.shown import Shown
from flatout.tuning.arguments import BUDGET_VARIABLE

SCHEMA_VERSION = 1
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""


@dataclass(frozen=True, repr=False)
class ModuleReport(Described):
    """Report on one module of a script.

    Attributes:
        module: class name of the module.
        report: the module's report.
    """

    module: str
    report: Report

    def _facts(self) -> dict[str, str]:
        return {"module": self.module, **self.report._facts()}


class ScriptReport(Shown):
    """Report on the tuning of a script, for terminals and files.

    Args:
        modules: the report of each tuned module.
        updates: number of the script's updates.
        trained_seconds: seconds of the script since its first update, without tuning.
        tuning_seconds: seconds of tuning.
        why_nothing: reason why nothing was tuned, if it is known.
    """

    _TITLE = "flatout run"

    def __init__(
        self,
        modules: Sequence[ModuleReport],
        updates: int,
        trained_seconds: float,
        tuning_seconds: float,
        why_nothing: str = "",
    ) -> None:
        self.modules = tuple(modules)
        self.updates = updates
        self.trained_seconds = trained_seconds
        self.tuning_seconds = tuning_seconds
        self.why_nothing = why_nothing

    @classmethod
    def of(cls, engine: Engine) -> ScriptReport:
        """Return the report on an engine's tuning so far."""
        reports = [(tuning.name, tuning.report) for tuning in engine.tunings if tuning.spent]
        modules = [ModuleReport(name, report) for name, report in reports if report is not None]
        allowance = engine.allowance
        if allowance is None:
            return cls(modules, 0, 0.0, 0.0, engine.why_nothing)
        is_limited = allowance.budget < math.inf
        why = engine.why_untuned or f"there were too few{f', or {BUDGET_VARIABLE} is too small' if is_limited else ''}"
        text = "" if modules else engine.why_nothing or f"{_nothing(engine.updates)}: {why}"
        return cls(modules, engine.updates, allowance.trained, allowance.spent, text)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as plain data."""
        return {
            "schema": "flatout.script",
            "schema_version": SCHEMA_VERSION,
            "updates": self.updates,
            "trained_seconds": self.trained_seconds,
            "tuning_seconds": self.tuning_seconds,
            "modules": [{"module": each.module, "report": each.report.to_dict()} for each in self.modules],
        }

    def _facts(self) -> dict[str, str]:
        results = {f"module {number}": _line(each) for number, each in enumerate(self.modules, 1)}
        updates = formatting.counted(self.updates, "update") if results else ""
        return {**(results or {"result": str(self)}), "updates": updates}

    def _blocks(self) -> Iterator[Block]:
        yield from map(Note, str(self).splitlines())

    def _page(self) -> Iterator[Block]:
        if not self.modules:
            yield Note(formatting.capital(str(self)), "headline")
        for each in self.modules:
            yield from wording.full(each.report.summary, each.module)

    def __str__(self) -> str:
        if self.why_nothing:
            return self.why_nothing
        if not self.updates:
            return "no optimizer has stepped in this process: nothing was tuned"
        seconds = self.trained_seconds + self.tuning_seconds
        took = f"tuned in {formatting.seconds(self.tuning_seconds)} of {formatting.seconds(seconds)}"
        if not self.modules:
            return _nothing(self.updates)
        lines = [_line(each) for each in self.modules]
        return "\n".join([*lines, took])


def _nothing(updates: int) -> str:
    return f"nothing was tuned in {formatting.counted(updates, 'update')}"


def _line(each: ModuleReport) -> str:
    """Return the headline of a module, with its kept techniques."""
    summary = each.report.summary
    kept = [row for row in summary.rows if row.technique in summary.won]
    chosen = ", ".join(f"{row.title} ({row.chosen})" for row in kept)
    return f"{each.module}: {wording.headline(summary)}{f', with {chosen}' if chosen else ''}"

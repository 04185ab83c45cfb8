"""Text form of a comparison: the answer, then the times, then the changes between the runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.console import ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.core import formatting
from flatout.report.comparison_data import Change, ComparedLoop, ComparedPart, ComparisonData
from flatout.report.estimates import MARGIN, Verdict
from flatout.report.measured_loop import FactKind
from flatout.report.terminal import plain_text, say

_STYLES: dict[Verdict | None, str] = {"faster": "green", "slower": "red", "same": "dim", "unknown": "yellow"}
_WORDS: dict[Verdict | None, str] = {
    "faster": "faster", "slower": "slower", "same": "same", "unknown": "cannot tell", None: "measured once",
}  # fmt: skip
_DRIFTED = (
    "The untuned loop is the same in both, but its speed changed, so the machine was faster in one run. "
    "The answer compares speeds relative to the untuned loop."
)
_COMMA = re.compile(r", (?![^\[]*\])")
"""Comma between two items, outside of brackets."""

LONGEST_FACT = 32
"""Largest number of characters of a fact that is shown in full. For longer facts, only differing items are shown."""


def render(comparison: ComparisonData, options: ConsoleOptions) -> Iterator[RenderableType]:
    """Yield the parts of the text, top to bottom."""
    plain = options.ascii_only
    yield say(f"a = {comparison.a}, b = {comparison.b}", plain, "dim")
    for loop in comparison.loops:
        name = f"{loop.name}: " if loop.name and len(comparison.loops) > 1 else ""
        yield say(f"{name}{answer(loop)}", plain, f"bold {_STYLES[loop.verdict]}".removesuffix(" dim"))
    if len(comparison.loops) == 1:
        yield _times(comparison.loops[0], plain)
    if any(loop.drifted for loop in comparison.loops):
        yield say(_DRIFTED, plain)
    for run in comparison.disturbed:
        yield say(f"Other programs used the cores when {run} was measured.", plain)
    yield _facts(comparison, plain)


def to_text(comparison: ComparisonData, width: int | None = None, ascii_only: bool | None = None) -> str:
    """Return the text of a comparison. ``width`` and ``ascii_only`` are those of ``plain_text``."""
    return plain_text(lambda options: render(comparison, options), width, ascii_only)


def answer(loop: ComparedLoop) -> str:
    """Return the answer on the difference of the speeds, with the interval of their ratio."""
    speed = f"{loop.speed.ratio:.2f}×"
    if loop.speed.interval is None:
        return f"cannot tell: b runs at {speed} the speed of a, but a run holds one measurement only"
    interval = f"95 %: {loop.speed.low:.2f} … {loop.speed.high:.2f}"
    mainly = f", mainly in {loop.mainly}" if loop.mainly else ""
    if loop.verdict in ("faster", "slower"):
        return f"yes, b is {loop.verdict}: {speed} the speed of a ({interval}){mainly}"
    if loop.verdict == "same":
        return f"no: b is as fast as a within {formatting.share(MARGIN, 0)}: {speed} ({interval})"
    return f"cannot tell: b runs at {speed} the speed of a ({interval})"


def _times(loop: ComparedLoop, plain: bool) -> Table:
    """Return rates and times of one loop."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(no_wrap=True, justify="right", min_width=11)
    table.add_column(no_wrap=True)
    unit = "batch" if loop.samples is None else f"{loop.samples:.4g} samples"
    table.add_row(Text(f"time of {unit}", style="bold"), Text("a", style="bold"), Text("b", style="bold"))
    for part in (*loop.parts, loop.batch, *filter(None, [loop.untuned])):
        table.add_row(*_row(part, plain))
    return table


def _row(part: ComparedPart, plain: bool) -> Iterator[Text]:
    yield say(f"{'    ' if part.whole else '  '}{part.name}", plain)
    yield say(formatting.milliseconds(part.a_ms), plain)
    yield say(formatting.milliseconds(part.b_ms), plain)
    yield say(_WORDS[part.verdict], plain, _STYLES.get(part.verdict, "dim"))


def _facts(comparison: ComparisonData, plain: bool) -> Table:
    """Return the facts that changed, the kinds without a change, and the kinds that are not recorded."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    by_kind: dict[FactKind, list[Change]] = {}
    for change in comparison.changes:
        by_kind.setdefault(change.kind, []).append(change)
    label = "changed"
    for kind, changes in by_kind.items():
        table.add_row(Text(label, style="bold"), say(f"{kind}: {'; '.join(map(_change, changes))}", plain))
        label = ""
    for label, kinds in (("same", comparison.same), ("not recorded", comparison.unrecorded)):
        if kinds:
            table.add_row(Text(label, style="bold"), say(", ".join(kinds), plain, "dim"))
    return table


def _change(change: Change) -> str:
    """Return a change in one line: ``torch 2.13.0 → 2.14.1``."""
    name = f"{change.loop} {change.name}".strip()
    if change.a is None or change.b is None:
        fact = change.a or change.b
        has = f"{name} ({fact})" if fact not in (None, "on") and change.kind != "code" else name
        return f"{has} only in {'b' if change.a is None else 'a'}"
    if change.kind == "code":
        return name
    a, b = change.a, change.b
    if max(len(a), len(b)) > LONGEST_FACT:
        ones, others = _COMMA.split(a), _COMMA.split(b)
        a, b = _without(ones, others), _without(others, ones)
    return f"{name} {a} → {b}"


def _without(items: Iterable[str], others: Iterable[str]) -> str:
    others = set(others)
    return ", ".join(item for item in items if item not in others) or "nothing"

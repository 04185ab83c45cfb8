"""How the report puts numbers and statuses, so that terminal and HTML say the same thing."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TypeGuard

from flatout.report.model import Gain, Row, Status, Summary, Trial

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Look:
    """How a status is shown.

    Attributes:
        mark: one character before the word.
        ascii_mark: the same where the terminal has ASCII only.
        style: rich style.
        css: class of the HTML pill.
        meaning: what the status says, for a legend.
    """

    mark: str
    ascii_mark: str
    style: str
    css: str
    meaning: str


LOOKS: dict[Status, Look] = {
    "kept": Look("✓", "+", "bold green", "kept", "in use: it pays on this model and data, or it is always right"),
    "rejected": Look("✗", "x", "yellow", "rejected", "measured here and undone: it does not pay"),
    "advice": Look("→", ">", "bold cyan", "advice", "only you can change this"),
    "not tried": Look("○", "o", "blue", "untried", "no time was left for it, or you forbade it"),
    "not applicable": Look("–", "-", "dim", "na", "has no meaning for this model, data or machine"),
    "not built yet": Look("…", ".", "dim", "na", "flatout cannot do this yet"),
}


def clean(text: str) -> str:
    """Drops control characters (a failure's message may hold terminal escapes) and outer white space."""
    return _CONTROL.sub("", text).strip()


def percent(ratio: float, digits: int | None = None) -> str:
    """1.25 becomes ``+25 %``; below ten per cent one decimal is kept.

    Args:
        ratio: new speed / old speed.
        digits: decimals; None chooses by size.
    """
    change = (ratio - 1) * 100
    if not math.isfinite(change):
        return "?"
    if digits is None:
        digits = _digits(ratio)
    text = f"{abs(change):.{digits}f}"
    sign = "" if float(text) == 0 else "+" if change > 0 else "−"
    return f"{sign}{text} %"


def _digits(ratio: float) -> int:
    return 1 if abs(ratio - 1) < 0.0995 else 0


def is_change(ratio: float | None) -> TypeGuard[float]:
    """Whether a measured ratio is one that is worth telling: one per cent or more."""
    return ratio is not None and abs(ratio - 1) >= 0.01


def interval(gain: Gain) -> str:
    """The 95 % interval, with the decimals of the gain that it belongs to: ``+21 … +29 %``."""
    digits = _digits(gain.ratio)
    return f"{percent(gain.low, digits).removesuffix(' %')} … {percent(gain.high, digits)}"


def milliseconds(value: float) -> str:
    """Three significant digits: ``0.412 ms``, ``6.23 ms``, ``184 ms``."""
    if not math.isfinite(value):
        return "?"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(3, max(0, 2 - magnitude))}f} ms"


def count(value: float) -> str:
    """A rate or a number of steps: ``12,340``; decimals only below ten."""
    if not math.isfinite(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:,.2g}"


def share(value: float | None) -> str:
    """0.123 becomes ``12.3 %``; nothing where it is not known."""
    return "" if value is None else f"{100 * value:.1f} %"


def size(count: float | None) -> str:
    """A number of bytes: ``640 B``, ``12.3 MB``, in powers of 1000; nothing where it is not known."""
    if count is None:
        return ""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    """A duration: ``8.4 s``, ``75 s``, ``4 min 10 s``."""
    if not math.isfinite(value):
        return "?"
    if value < 100:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def trial_notes(trial: Trial) -> list[str]:
    """What else is known of a trial: failure, one-off cost, break-even, loss difference, pairs."""
    notes = []
    if trial.failure:
        notes.append(clean(trial.failure))
    if trial.setup_seconds >= 0.05:
        notes.append(f"{seconds(trial.setup_seconds)} to set up")
    if trial.break_even_steps is not None:
        notes.append(f"pays back after {count(trial.break_even_steps)} steps")
    if trial.loss_difference is not None:
        notes.append(f"losses within {trial.loss_difference:.2g} of the baseline's")
    return notes


def speedup(summary: Summary) -> float | None:
    """Samples per second after / before; None when that was not measured."""
    if summary.before is None or summary.after is None or not summary.before.samples_per_second > 0:
        return None
    return summary.after.samples_per_second / summary.before.samples_per_second


def tally(rows: tuple[Row, ...]) -> list[tuple[Status, int]]:
    """How many rows have each status, in the order of ``LOOKS``, without zeros."""
    counts = Counter(row.status for row in rows)
    return [(status, counts[status]) for status in LOOKS if counts[status]]


def headline(summary: Summary) -> str:
    """The result in one line."""
    factor = speedup(summary)
    if factor is None:
        return "nothing was timed"
    if factor >= 1.01:
        return f"{factor:.2f}× the speed it came with"
    return "as fast as it came" if factor > 0.99 else f"{factor:.2f}× the speed it came with (slower)"

"""How the report puts statuses, gains and trials, so that terminal and HTML say the same thing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeGuard

from flatout import words
from flatout.report.model import Gain, Row, Status, Summary, Trial


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


def is_change(ratio: float | None) -> TypeGuard[float]:
    """Whether a measured ratio is one that is worth telling: one per cent or more."""
    return ratio is not None and abs(ratio - 1) >= 0.01


def interval(gain: Gain) -> str:
    """The 95 % interval, with the decimals of the gain that it belongs to: ``+21 … +29 %``."""
    digits = words.decimals(gain.ratio - 1)
    return f"{words.percent(gain.low, digits).removesuffix(' %')} … {words.percent(gain.high, digits)}"


def trial_notes(trial: Trial) -> list[str]:
    """What else is known of a trial: failure, one-off cost, break-even, loss difference, pairs."""
    notes = []
    if trial.failure:
        notes.append(words.clean(trial.failure))
    if trial.setup_seconds >= 0.05:
        notes.append(f"{words.seconds(trial.setup_seconds)} to set up")
    if trial.break_even_steps is not None:
        notes.append(f"pays back after {words.count(trial.break_even_steps)} steps")
    differences = (
        ("outputs", trial.output_difference),
        ("gradients", trial.gradient_difference),
        ("losses", trial.loss_difference),
    )
    within = [f"{what} within {by:.2g}" for what, by in differences if by is not None]
    if within:
        notes.append(f"{', '.join(within)} of the baseline's")
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

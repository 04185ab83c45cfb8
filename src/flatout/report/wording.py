"""Wording of statuses, gains and trials, which terminal and HTML share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from flatout.core import formatting
from flatout.report.model import Gain, Pace, RankPace, Row, Status, Summary, Trial


@dataclass(frozen=True)
class StatusLook:
    """Look of a status.

    Attributes:
        mark: one character before the word.
        ascii_mark: mark in a terminal with ASCII alone.
        style: style of rich.
        css: class of the HTML pill.
        meaning: meaning of the status, for a legend.
    """

    mark: str
    ascii_mark: str
    style: str
    css: str
    meaning: str


LOOKS: dict[Status, StatusLook] = {
    "kept": StatusLook("✓", "+", "bold green", "kept", "in use: it pays on this model and data, or it is always right"),
    "rejected": StatusLook("✗", "x", "yellow", "rejected", "measured here and undone: it does not pay"),
    "advice": StatusLook("→", ">", "bold cyan", "advice", "only you can change this"),
    "not tried": StatusLook("○", "o", "blue", "untried", "no time was left for it, or you forbade it"),
    "not applicable": StatusLook("–", "-", "dim", "na", "has no meaning for this model, data or machine"),
}


class PartLook(NamedTuple):
    """Look of a part of a batch's time.

    Attributes:
        name: name of the part.
        short: name in the heading of a narrow column.
        color: color of the style sheet.
    """

    name: str
    short: str
    color: str


WAITING = PartLook("waiting for data", "wait for data", "var(--load)")
COMPUTING = PartLook("computing", "step", "var(--step)")
PHASES = {
    "forward": PartLook("forward and loss", "forward", "var(--step)"),
    "backward": PartLook("backward", "backward", "var(--untried)"),
    "update": PartLook("update", "update", "var(--kept)"),
    "other": PartLook("the rest of the step", "rest", "var(--soft)"),
}
"""Looks of the phases of a step, in their order."""

UNEXPLAINED = "not explained by these"

STRAGGLES = 1.1
"""Time of the slowest rank, relative to the fastest rank, above which the report names the slowest rank."""

FASTER = 1.01
"""Smallest speedup that counts as a gain."""


class Figure(NamedTuple):
    """Figure of the loop, before and after.

    Attributes:
        name: name of the figure.
        values: one for each loop; empty if unknown.
        meaning: explanation of the name.
    """

    name: str
    values: tuple[str, ...]
    meaning: str


def paces(summary: Summary) -> dict[str, Pace]:
    """Return the known paces, by label."""
    both = {"before": summary.before, "after": summary.after}
    return {label: pace for label, pace in both.items() if pace is not None}


def times(*paces: Pace) -> list[tuple[PartLook, list[float]]]:
    """Return the parts of a batch's time, each with its milliseconds in every pace.

    The step is divided into phases if all paces have phases. Parts without time in all paces are omitted.
    """
    parts = [(WAITING, [pace.load_ms for pace in paces])]
    if all(pace.phases for pace in paces):
        named = [name for name in PHASES if name != "other"]
        for name in named:
            parts.append((PHASES[name], [pace.step_ms * pace.phases.get(name, 0.0) for pace in paces]))
        rest = [pace.step_ms * (1 - sum(pace.phases.get(name, 0.0) for name in named)) for pace in paces]
        parts.append((PHASES["other"], [max(0.0, ms) for ms in rest]))
    else:
        parts.append((COMPUTING, [pace.step_ms for pace in paces]))
    return [(part, ms) for part, ms in parts if any(ms)]


_FIGURES: tuple[tuple[str, Callable[[Pace], float | None], Callable[[float], str], str], ...] = (
    ("samples/s", lambda pace: pace.samples_per_second, formatting.count, "what training gets through"),
    (
        "loader alone",
        lambda pace: pace.loader_per_second,
        formatting.count,
        "samples/s that the loader would deliver if no step came between",
    ),
    (
        "step alone",
        lambda pace: pace.step_per_second,
        formatting.count,
        "samples/s that the step would take if it never waited for data",
    ),
    (
        "step memory",
        lambda pace: pace.step_bytes,
        formatting.size_of,
        "what a step takes on top of parameters, gradients and optimizer state",
    ),
    (
        "MFU",
        lambda pace: pace.mfu,
        lambda mfu: formatting.share(mfu, 1),
        "share of the device's fastest arithmetic that goes into the model",
    ),
    (
        "exposed communication",
        lambda pace: pace.exposed_ms,
        formatting.milliseconds,
        "what averaging gradients over all ranks adds to a step",
    ),
    (
        "scaling efficiency",
        lambda pace: pace.scaling,
        lambda scaling: formatting.share(scaling, 1),
        "speed of a rank relative to one rank that trains alone",
    ),
)


def figures(*paces: Pace) -> list[Figure]:
    """Return the rates and costs of the paces. Figures that no pace has are omitted."""
    found = []
    for name, value, text_of, meaning in _FIGURES:
        values = [value(pace) for pace in paces]
        if any(value is not None for value in values):
            found.append(Figure(name, tuple("" if v is None else text_of(v) for v in values), meaning))
    return found


RANKS_SHOWN = 8
"""Largest number of ranks that are shown one by one."""


def rank_table(ranks: Sequence[RankPace]) -> list[tuple[str, ...]]:
    """Return a table of the slowest ``RANKS_SHOWN`` ranks, with its heading. The JSON form has all ranks."""
    if not ranks:
        return []
    slowest = sorted(ranks, key=lambda rank: -rank.own_ms)[:RANKS_SHOWN]
    with_mfu = any(rank.mfu is not None for rank in ranks)
    first = "rank" if len(slowest) == len(ranks) else f"slowest of {len(ranks)}"
    rows = [(first, "host", "device", "computing", "waiting", *(["MFU"] if with_mfu else []))]
    for rank in sorted(slowest, key=lambda rank: rank.rank):
        mfu = [] if not with_mfu else ["" if rank.mfu is None else formatting.share(rank.mfu, 1)]
        times = formatting.milliseconds(rank.compute_ms), formatting.milliseconds(rank.wait_ms)
        rows.append((str(rank.rank), formatting.clean(rank.host), rank.device, *times, *mfu))
    return rows


def straggler(ranks: Sequence[RankPace]) -> str:
    """Return a sentence on the slowest rank; empty if no rank exceeds ``STRAGGLES``."""
    if not ranks:
        return ""
    slowest, fastest = max(ranks, key=lambda rank: rank.own_ms), min(ranks, key=lambda rank: rank.own_ms)
    if not fastest.own_ms or slowest.own_ms < STRAGGLES * fastest.own_ms:
        return ""
    return (
        f"All ranks wait for rank {slowest.rank} ({formatting.clean(slowest.host)}, {slowest.device}): it computes "
        f"{formatting.share(slowest.own_ms / fastest.own_ms - 1, 0)} longer than rank {fastest.rank}."
    )


def ranks_in_words(pace: Pace) -> str:
    """Return the number of ranks, communication and scaling, and the slowest rank; empty for one process."""
    if not pace.ranks:
        return ""
    told = [str(len(pace.ranks))]
    if pace.exposed_ms is not None:
        told.append(f"exposed communication {formatting.milliseconds(pace.exposed_ms)} a step")
    if pace.scaling is not None:
        told.append(f"scaling {formatting.share(pace.scaling)}")
    return "\n".join(filter(None, (" · ".join(told), straggler(pace.ranks))))


def name(row: Row, candidate: str) -> str:
    """Return the names of a technique and of its candidate."""
    title = formatting.clean(row.title)
    return title if candidate in ("", row.title) else f"{title}: {formatting.clean(candidate)}"


def purpose(row: Row) -> str:
    """Return the effect of a technique; empty for a kept technique, whose reason states the effect."""
    text = formatting.clean(row.purpose)
    return "" if not text or row.status == "kept" else f"{formatting.capital(text)}."


def change(ms: float) -> str:
    """Return a change of a time: ``−2.10 ms``."""
    text = formatting.milliseconds(abs(ms))
    return text if not ms else f"{'−' if ms < 0 else '+'}{text}"


def is_change(ratio: float | None) -> TypeGuard[float]:
    """Return True if a measured ratio is a change of one percent or more."""
    return ratio is not None and abs(ratio - 1) >= 0.01


def interval(gain: Gain, pairs: int | None) -> str:
    """Return the 95 % interval, with the decimals of its gain: ``+21 … +29 %``.

    Without an interval, the text has the number of pairs: ``from 2 pairs, no interval``.

    Args:
        gain: a gain.
        pairs: number of pairs that the gain was measured with; None if unknown.
    """
    if gain.interval is None:
        if pairs is None:
            return "no interval"
        return "from one pair" if pairs == 1 else f"from {pairs} pairs, no interval"
    digits = formatting.decimals(gain.ratio - 1)
    low, high = (formatting.percent(end, digits) for end in gain.interval)
    return f"{low.removesuffix(' %')} … {high}"


def trial_notes(trial: Trial) -> list[str]:
    """Return further facts of a trial: failure, setup time, break-even, and differences from the baseline."""
    notes = []
    if trial.failure:
        notes.append(formatting.clean(trial.failure))
    if trial.setup_seconds >= 0.05:
        notes.append(f"{formatting.seconds(trial.setup_seconds)} to set up")
    if trial.break_even_steps is not None:
        notes.append(f"pays back after {formatting.count(trial.break_even_steps)} steps")
    differences = (
        ("outputs", trial.output_difference),
        ("gradients", trial.gradient_difference),
        ("losses", trial.loss_difference),
    )
    found = [f"{what} by {_part(by)}" for what, by in differences if by is not None]
    if found:
        notes.append(f"differs from the baseline: {', '.join(found)}")
    return notes


def _part(difference: float) -> str:
    return f"{100 * difference:.2g} %" if difference >= 1e-4 or not difference else "less than 0.01 %"


def speedup(summary: Summary) -> float | None:
    """Return the speed of the tuned loop relative to the original; None if unknown.

    Reports without a race have the ratio of the samples per second.
    """
    if summary.gain is not None:
        return summary.gain.ratio
    if summary.before is None or summary.after is None or not summary.before.samples_per_second > 0:
        return None
    return summary.after.samples_per_second / summary.before.samples_per_second


def cost(summary: Summary) -> str:
    """Return the seconds of the tuning, and the steps until the tuning has paid back; empty if unknown."""
    if not summary.tuning_seconds > 0:
        return ""
    factor, steps = speedup(summary), summary.pays_back_after
    tuned = f"tuned in {formatting.seconds(summary.tuning_seconds)}"
    if factor is None or steps is None or factor < FASTER:
        return tuned
    return f"{tuned}, pays back after {formatting.count(math.ceil(steps))} steps"


def tally(rows: tuple[Row, ...]) -> list[tuple[Status, int]]:
    """Return the number of rows with each status, in the order of ``LOOKS``, without zeros."""
    counts = Counter(row.status for row in rows)
    return [(status, counts[status]) for status in LOOKS if counts[status]]


def headline(summary: Summary) -> str:
    """Return the result in one line."""
    factor = speedup(summary)
    if factor is None:
        return "tuned, with no time left to race it against the loop as it came" if summary.won else "nothing was timed"
    if factor >= FASTER:
        return f"{factor:.2f}× the speed it came with{_in_parentheses(factor_interval(summary))}"
    return "as fast as it came" if factor > 0.99 else f"{factor:.2f}× the speed it came with (slower)"


def factor_interval(summary: Summary) -> str:
    """Return the 95 % interval of the speedup: ``1.97 … 2.11`` or ``1.97 … 2.11 by CPU time``; empty without one."""
    if summary.gain is None or summary.gain.interval is None:
        return ""
    low, high = summary.gain.interval
    return f"{low:.2f} … {high:.2f}" + " by CPU time" * (summary.gain_statistic == "cpu")


def _in_parentheses(text: str) -> str:
    return f" ({text})" if text else ""

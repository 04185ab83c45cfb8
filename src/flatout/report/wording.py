"""Receipt and full report: the blocks that terminal and page share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeGuard

from flatout.core import formatting
from flatout.report.document import Block, Cell, Chart, Note, Part, Table
from flatout.report.model import Gain, Pace, RankPace, Row, Status, Summary, Trial

LOOKS: Mapping[Status, tuple[str, str]] = {
    "kept": ("✓", "kept"),
    "rejected": ("✗", "rejected"),
    "advice": ("→", "advice"),
    "not tried": ("○", "untried"),
    "not applicable": ("–", "na"),
}
"""Mark and style of each status."""

PHASES = {"forward": "forward and loss", "backward": "backward", "update": "update"}
"""Names of the phases of a step, in their order."""

UNEXPLAINED = "not explained by these"

STRAGGLES = 1.1
"""Time of the slowest rank, relative to the fastest rank, above which the report names the slowest rank."""

FASTER = 1.01
"""Smallest speedup that counts as a gain."""

RANKS_SHOWN = 8
"""Largest number of ranks that are shown one by one."""

_FIGURES: tuple[tuple[str, Callable[[Pace], float | None], Callable[[float], str], str], ...] = (
    ("samples/s", lambda p: p.samples_per_second, formatting.count, "samples of all ranks"),
    ("loader alone", lambda p: p.loader_per_second, formatting.count, "samples/s of the loader without steps"),
    ("step alone", lambda p: p.step_per_second, formatting.count, "samples/s of the step without waiting for data"),
    ("step memory", lambda p: p.step_bytes, formatting.size_of, "peak beyond parameters, gradients, optimizer state"),
    ("MFU", lambda p: p.mfu, lambda mfu: formatting.share(mfu, 1), "FLOP/s relative to the device's peak"),
    ("exposed communication", lambda p: p.exposed_ms, formatting.milliseconds, "time to average gradients, per step"),
    ("scaling efficiency", lambda p: p.scaling, lambda part: formatting.share(part, 1), "relative to a rank alone"),
)  # fmt: skip
"""Name, value, format and meaning of the figures of a pace."""


def receipt(summary: Summary) -> Iterator[Block]:
    """Yield the blocks of one screen, with the technique names of ``optimize(techniques=...)``."""
    yield Note(headline(summary), "headline")
    yield Note([*_rates(summary), in_use(summary)], label=" ", gap=" · ")
    timed = [row for row in summary.in_use if row not in summary.rules]
    rows = [*_receipt_rows("in use", timed), *_receipt_rows("tried", _of(summary, "rejected"))]
    if rows:
        yield Table(rows, right=frozenset({3}), is_explained=True)
    yield from _remarks("not tried", "untried", [row for row in _of(summary, "not tried") if not row.left_out])
    yield from _remarks("advice", "advice", _of(summary, "advice"))
    if summary.rules:
        yield Note(f"always on: {', '.join(row.technique for row in summary.rules)}", label="rules")
    yield from _batch_chart(summary, "batch")
    pace = summary.after or summary.before
    if pace is not None and pace.ranks:
        yield Note(_ranks_in_words(pace), label="ranks")
    if pace is not None and straggler(pace.ranks):
        yield Note(straggler(pace.ranks), label=" ")
    if summary.verdict:
        yield Note(summary.verdict, label="limit")
    yield from _notes(summary)
    yield Note(" · ".join(filter(None, [cost(summary), f"report.full() lists all {len(summary.rows)} rows"])), "quiet")
    yield from environment(summary.environment)


def full(summary: Summary, title: str = "") -> Iterator[Block]:
    """Yield the blocks of the whole report: times, gains, and every row with its reason.

    Args:
        summary: the report.
        title: name of the tuned module, in a report on several modules.
    """
    factor, rest = _result(summary)
    shown: list[Part] = [(factor, "factor"), rest] if factor else [rest if title else formatting.capital(rest)]
    yield Note([f"{title}: ", *shown] if title else shown, "headline")
    if _rates(summary):
        yield Note(_rates(summary), "lead", gap=" · ")
    tally = Counter("rule" if row in summary.rules else row.status for row in summary.rows)
    words = [(f"{mark} {tally[status]} {status}", style) for status, (mark, style) in LOOKS.items() if tally[status]]
    if tally["rule"]:
        words.insert(bool(tally["kept"]), (f"✓ {formatting.counted(tally['rule'], 'rule')}", "na"))
    if words:
        yield Note(words, gap=" ")
    yield from _batch(summary)
    yield from _waterfall(summary)
    yield from _gains(summary.rows)
    reasons: dict[str, list[Part]] = {}
    for row in _of(summary, "not applicable"):
        reasons.setdefault(row.why, []).append((row.title, "quiet"))
    listed = [row for row in summary.rows if row.status != "not applicable"]
    if listed:
        yield Note("The checklist", "title")
        yield _checklist(listed, summary.rules)
    if reasons:
        folded = f"{formatting.counted(tally['not applicable'], 'technique')} not applicable here"
        rows: list[list[Cell]] = [[names, (reason, "why")] for reason, names in reasons.items()]
        yield Table(rows, ["technique", "reason"], is_explained=True, folded=folded)
    if summary.notes or summary.environment:
        yield Note("Conditions", "title")
    yield from _notes(summary)
    yield from environment(summary.environment)


def environment(facts: Mapping[str, str]) -> Iterator[Note]:
    """Yield the environment of figures: each name with its value."""
    if facts:
        told = [f"{name} {value}" for name, value in facts.items()]
        yield Note(told, "quiet", gap=" · ")


def headline(summary: Summary) -> str:
    """Return the result in one line."""
    return "".join(_result(summary))


def in_use(summary: Summary) -> str:
    """Return the number of techniques in use. Rules are no techniques, because nothing decides on them."""
    rules = len(summary.rules)
    return f"{len(summary.in_use) - rules} of {len(summary.rows) - rules} techniques in use"


def _rates(summary: Summary) -> list[str]:
    """Return samples per second, and the MFU if both MFUs refer to the peak of one precision."""
    before, after = summary.before, summary.after
    if before is None or after is None:
        return []
    rates = " → ".join(map(formatting.count, (before.samples_per_second, after.samples_per_second)))
    if before.mfu is None or after.mfu is None or any(row.technique in ("precision", "tf32") for row in summary.in_use):
        return [f"{rates} samples/s"]
    return [f"{rates} samples/s", f"MFU {formatting.share(before.mfu, 1)} → {formatting.share(after.mfu, 1)}"]


def _result(summary: Summary) -> tuple[str, str]:
    """Return the speed of a faster loop, and the rest of the headline."""
    factor = speedup(summary)
    if factor is None:
        return "", "tuned, without time for a race against the original" if summary.won else "nothing was timed"
    busy = ", measured on a busy machine" if summary.is_busy else ""
    if factor >= FASTER:
        return f"{factor:.2f}×", f" the speed it came with{_factor_interval(summary)}{busy}"
    if summary.rows and not summary.won and not any(row.trials or row.gain is not None for row in summary.rows):
        reasons = Counter(_first_line(row) for row in _of(summary, "not tried") if not row.left_out)
        return "", ": ".join(["nothing was tried", *(reason for reason, _ in reasons.most_common(1))])
    return "", ("as fast as it came" if factor > 0.99 else f"{factor:.2f}× the speed it came with (slower)") + busy


def speedup(summary: Summary) -> float | None:
    """Return the speed of the tuned loop relative to the original; None if unknown.

    Reports without a race have the ratio of the samples per second.
    """
    if summary.gain is not None:
        return summary.gain.ratio
    if summary.before is None or summary.after is None or not summary.before.samples_per_second > 0:
        return None
    return summary.after.samples_per_second / summary.before.samples_per_second


def _factor_interval(summary: Summary) -> str:
    """Return the 95 % interval of the speedup: `` (1.97 … 2.11 by CPU time)``; empty without one."""
    if summary.gain is None or summary.gain.interval is None:
        return ""
    low, high = summary.gain.interval
    return f" ({low:.2f} … {high:.2f}{' by CPU time' * (summary.gain_statistic == 'cpu')})"


def cost(summary: Summary) -> str:
    """Return the seconds of the tuning, and the steps until the tuning has paid back; empty if unknown."""
    if not summary.tuning_seconds > 0:
        return ""
    factor, steps = speedup(summary), summary.pays_back_after
    tuned = f"tuned in {formatting.seconds(summary.tuning_seconds)}"
    if factor is None or steps is None or factor < FASTER:
        return tuned
    return f"{tuned}, pays back after {formatting.count(math.ceil(steps))} steps"


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


def _receipt_rows(label: str, rows: Iterable[Row]) -> Iterator[list[Part]]:
    """Yield rows of the receipt, the largest gains first. The first row has the label."""
    style = LOOKS["kept" if label == "in use" else "rejected"][1]
    by_gain = sorted(rows, key=lambda row: 0.0 if row.gain is None else row.gain.ratio, reverse=True)
    for index, row in enumerate(by_gain):
        timed = (trial.candidate for trial in row.trials if trial.gain is not None and trial.gain == row.gain)
        figures = [] if row.gain is None else [interval(row.gain, row.gain_pairs)]
        if is_change(row.memory):
            figures.append(f"memory {formatting.percent(row.memory)}")
        yield [
            (f"{'' if index else label:9}", style),
            (row.technique, "strong"),
            row.chosen or next(timed, ""),
            ("" if row.gain is None else formatting.percent(row.gain.ratio), style),
            (", ".join(figures), "quiet"),
            ("" if row.status == "kept" else _first_line(row), "quiet"),
        ]


def _remarks(label: str, style: str, rows: Iterable[Row]) -> Iterator[Note]:
    """Yield the reasons of techniques that were not timed, each reason once."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(_first_line(row), []).append(row.technique)
    for index, (reason, techniques) in enumerate(names.items()):
        yield Note([f"{', '.join(techniques)}: {reason}"], style, " " if index else label)


def _of(summary: Summary, status: Status) -> list[Row]:
    return [row for row in summary.rows if row.status == status]


def _first_line(row: Row) -> str:
    return row.why.partition("\n")[0]


def _notes(summary: Summary) -> Iterator[Note]:
    for index, note in enumerate(summary.notes):
        yield Note(note, label=" " if index else "note")


def _paces(summary: Summary) -> dict[str, Pace]:
    """Return the known paces, by label."""
    both = {"before": summary.before, "after": summary.after}
    return {label: pace for label, pace in both.items() if pace is not None}


def times(*paces: Pace) -> list[tuple[str, str, list[float]]]:
    """Return the parts of a batch's time: name, style, and the milliseconds in every pace.

    The step is divided into phases if all paces have phases. Parts without time in all paces are omitted.
    """
    parts = [("waiting for data", "load", [pace.load_ms for pace in paces])]
    if all(pace.phases for pace in paces):
        for phase, name in PHASES.items():
            parts.append((name, phase, [pace.step_ms * pace.phases.get(phase, 0.0) for pace in paces]))
        shares = [sum(pace.phases.get(phase, 0.0) for phase in PHASES) for pace in paces]
        rest = [max(0.0, pace.step_ms * (1 - share)) for pace, share in zip(paces, shares, strict=True)]
        parts.append(("rest", "rest", rest))
    else:
        parts.append(("computing", "forward", [pace.step_ms for pace in paces]))
    return [part for part in parts if any(part[2])]


def _batch_chart(summary: Summary, label: str = "") -> Iterator[Chart]:
    """Yield a bar for the time of a batch before and after, divided into its parts; nothing without times."""
    paces = _paces(summary)
    if not 0 < sum(pace.total_ms for pace in paces.values()) < math.inf:
        return
    bars = []
    for index, (name, pace) in enumerate(paces.items()):
        parts = [(part, style, ms[index]) for part, style, ms in times(*paces.values())]
        ends = accumulate((ms for _, _, ms in parts), initial=0.0)
        segments = [(*ends, style, part) for ends, (part, style, _) in zip(pairwise(ends), parts, strict=True)]
        epoch = summary.epoch_seconds(pace)
        value = formatting.milliseconds(pace.total_ms) + (f", {formatting.seconds(epoch)} an epoch" if epoch else "")
        bars.append((name, value, segments))
    yield Chart(f"milliseconds per batch {' and '.join(paces)}, by what they go to", bars, label=label)


def _batch(summary: Summary) -> Iterator[Block]:
    """Yield times, rates and costs of a batch before and after, with the meaning of each figure."""
    paces = _paces(summary)
    if not paces:
        return
    yield Note(f"One batch, {' and '.join(paces)}", "title")
    yield from _batch_chart(summary)
    rows: list[list[Part]] = []
    for name, value, text_of, meaning in _FIGURES:
        values = [value(pace) for pace in paces.values()]
        if any(each is not None for each in values):
            rows.append([name, *("" if each is None else text_of(each) for each in values), (meaning, "quiet")])
    numbers = frozenset(range(1, len(paces) + 1))
    yield Table(rows, ["", *paces, ""], numbers, is_explained=True)
    if summary.verdict:
        yield Note(summary.verdict)
    if cost(summary):
        yield Note(f"{formatting.capital(cost(summary))}.", "quiet")
    ranks = list(paces.values())[-1].ranks
    if ranks:
        yield Note("Each rank", "title")
        yield _rank_table(ranks)
    if straggler(ranks):
        yield Note(straggler(ranks))


def _rank_table(ranks: Sequence[RankPace]) -> Table:
    """Return a table of the slowest ``RANKS_SHOWN`` ranks. The JSON form has all ranks."""
    slowest = sorted(ranks, key=lambda rank: -rank.own_ms)[:RANKS_SHOWN]
    first = "rank" if len(slowest) == len(ranks) else f"slowest of {len(ranks)}"
    rows = []
    for rank in sorted(slowest, key=lambda rank: rank.rank):
        spent = formatting.milliseconds(rank.compute_ms), formatting.milliseconds(rank.wait_ms)
        place = rank.host, rank.device
        rows.append([str(rank.rank), *place, *spent, "" if rank.mfu is None else formatting.share(rank.mfu, 1)])
    return Table(rows, [first, "host", "device", "computing", "waiting", "MFU"], frozenset({0, 3, 4, 5}))


def straggler(ranks: Sequence[RankPace]) -> str:
    """Return a sentence on the slowest rank; empty if no rank exceeds ``STRAGGLES``."""
    if not ranks:
        return ""
    slowest, fastest = max(ranks, key=lambda rank: rank.own_ms), min(ranks, key=lambda rank: rank.own_ms)
    if not fastest.own_ms or slowest.own_ms < STRAGGLES * fastest.own_ms:
        return ""
    return (
        f"All ranks wait for rank {slowest.rank} ({slowest.host}, {slowest.device}): it computes "
        f"{formatting.share(slowest.own_ms / fastest.own_ms - 1, 0)} longer than rank {fastest.rank}."
    )


def _ranks_in_words(pace: Pace) -> str:
    """Return the number of ranks, communication and scaling."""
    told = [str(len(pace.ranks))]
    if pace.exposed_ms is not None:
        told.append(f"exposed communication {formatting.milliseconds(pace.exposed_ms)} a step")
    if pace.scaling is not None:
        told.append(f"scaling {formatting.share(pace.scaling)}")
    return " · ".join(told)


def waterfall(summary: Summary) -> list[tuple[str, float]]:
    """Return the changes of a batch's time by the techniques that trials kept, in order: name and milliseconds.

    The last change is that of the total time that the trials do not explain. The list is empty if no trial kept a
    technique or the times are unknown.
    """
    before, after = summary.before, summary.after
    rows = {row.technique: row for row in summary.rows}
    changes = []
    for row in (rows[name] for name in summary.won if name in rows):
        trial = row.chosen_trial
        if trial is not None and trial.gain is not None and trial.gain.ratio > 0:
            ms = trial.paired_ms - trial.baseline_ms
            changes += [(_name(row, row.chosen), ms)] if math.isfinite(ms) else []
    if not changes or before is None or after is None or not (0 < before.total_ms < math.inf):
        return []
    rest = after.total_ms - before.total_ms - math.fsum(ms for _, ms in changes)
    return [*changes, (UNEXPLAINED, rest)] if math.isfinite(rest) else []


def _waterfall(summary: Summary) -> Iterator[Block]:
    """Yield the times of a batch from the original loop to the tuned loop. Each bar starts where the last one ends."""
    changes = waterfall(summary)
    if not changes or summary.before is None or summary.after is None:
        return
    before, after = summary.before.total_ms, summary.after.total_ms
    levels = accumulate((ms for _, ms in changes), initial=before)
    bars = [("as it came", formatting.milliseconds(before), [(0.0, before, "whole", "")])]
    for (name, ms), ends in zip(changes, pairwise(levels), strict=True):
        style = "rest" if name == UNEXPLAINED else "kept" if ms <= 0 else "rejected"
        bars.append((name, _change(ms), [(*ends, style, "")]))
    bars.append(("as tuned", formatting.milliseconds(after), [(0.0, after, "whole", "")]))
    yield Note("Where the time went", "title")
    label = "milliseconds of a batch, from the loop as it came to the loop as tuned, by technique"
    yield Chart(label, bars, tick=lambda ms: f"{ms:,g} ms", is_connected=True)
    yield Note(
        "Each bar is the time per batch that a technique saves or adds, with the techniques above in use. "
        f"“{UNEXPLAINED.capitalize()}” is the rest of the measured change. Techniques that help or hinder each other "
        "cause the rest, and so does a machine whose speed changes.",
        "quiet",
    )


def _gains(rows: Iterable[Row]) -> Iterator[Block]:
    """Yield a bar for the gain of each timed trial, with its 95 % interval if known."""
    bars, intervals = [], []
    for row in rows:
        for trial in row.trials:
            gain = trial.gain
            if gain is None or not math.isfinite(gain.ratio):
                continue
            is_noise = gain.interval is not None and gain.interval[0] <= 1 <= gain.interval[1]
            is_kept = row.status == "kept" and trial.candidate == row.chosen
            style, name = ("kept", "in use") if is_kept else ("rejected", "tried, undone")
            if is_noise:
                style, name = "noise", "noise: the interval contains 0"
            value = f"{formatting.percent(gain.ratio)} ({interval(gain, trial.pairs)}){' noise' * is_noise}"
            bars.append((_name(row, trial.candidate), value, [(0.0, gain.ratio - 1, style, name)]))
            intervals.append(tuple(end - 1 for end in gain.interval or ()))
    if not bars:
        return
    yield Note("What each candidate brought", "title")
    label = "speed gained by every candidate that was timed, with 95 % intervals"
    yield Chart(label, bars, intervals, lambda gain: formatting.percent(1 + gain, 0) if gain else "as before", 0.05)
    yield Note(
        "A bar to the right is a gain in speed. Steps with and without the candidate took turns. The 95 % interval of "
        "the gain is in parentheses. A page shows the interval as a line.",
        "quiet",
    )


def _checklist(rows: Iterable[Row], rules: Sequence[Row]) -> Table:
    cells: list[list[Cell]] = []
    for row in rows:
        mark, style = LOOKS[row.status]
        status = (f"{mark} rule", "na") if row in rules else (f"{mark} {row.status}", style)
        speed: list[Part] = []
        if row.gain is not None:
            speed = [(formatting.percent(row.gain.ratio), "strong"), (interval(row.gain, row.gain_pairs), "quiet")]
        if is_change(row.memory):
            speed.append(f"memory {formatting.percent(row.memory)}")
        if row.expected:
            speed.append((f"usually {row.expected}", "quiet"))
        # The reason of a kept technique states its effect.
        has_purpose = bool(row.purpose) and row.status != "kept"
        why: list[Part] = [(f"{formatting.capital(row.purpose)}.", "purpose")] * has_purpose
        why += [(row.why, "why"), *((_trial_line(trial), "trial") for trial in row.trials)]
        names: list[Part] = [(row.title, "strong")]
        if row.chosen and row.chosen != row.title:
            names.append((row.chosen, "chosen"))
        cells.append(["+" if row.number is None else str(row.number), names, status, speed, why])
    headings = ["#", "technique", "result", "speed", "effect, and reason of the result"]
    return Table(cells, headings, frozenset({0, 3}), is_explained=True)


def _trial_line(trial: Trial) -> str:
    """Return the facts about a trial, numbers first."""
    facts = []
    if trial.gain is not None:
        spent = f"{formatting.milliseconds(trial.baseline_ms)} → {formatting.milliseconds(trial.paired_ms)}"
        gain = f"{formatting.percent(trial.gain.ratio)} ({interval(trial.gain, trial.pairs)})"
        facts.append(f"{spent}, {gain}, {trial.pairs} pairs" if trial.gain.interval else f"{spent}, {gain}")
    if trial.baseline_bytes is not None and trial.candidate_bytes is not None:
        sizes = f"{formatting.size_of(trial.baseline_bytes)} → {formatting.size_of(trial.candidate_bytes)}"
        facts.append(f"step memory {sizes}")
    return f"{trial.candidate}: {'; '.join(facts + _trial_notes(trial)) or 'not timed'}"


def _trial_notes(trial: Trial) -> list[str]:
    """Return further facts of a trial: failure, setup time, break-even, and differences from the baseline."""
    notes = []
    if trial.failure:
        notes.append(trial.failure)
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


def _name(row: Row, candidate: str) -> str:
    """Return the names of a technique and of its candidate."""
    title = row.title
    return title if candidate in ("", row.title) else f"{title}: {candidate}"


def _change(ms: float) -> str:
    """Return a change of a time: ``−2.10 ms``."""
    text = formatting.milliseconds(abs(ms))
    return text if not ms else f"{'−' if ms < 0 else '+'}{text}"


def is_change(ratio: float | None) -> TypeGuard[float]:
    """Return True if a measured ratio is a change of one percent or more."""
    return ratio is not None and abs(ratio - 1) >= 0.01

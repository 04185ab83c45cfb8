"""Comparison of two runs: the ratio of their speeds, the times of their parts, and the changes between the runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderableType

from flatout.report import comparison_text, serialize
from flatout.report.comparison_data import Change, ComparedLoop, ComparedPart, ComparisonData
from flatout.report.estimates import Estimate, Spreads, part_verdict, speed_ratio, speed_verdict
from flatout.report.measured_loop import FactKind, MeasuredLoop, Source, measured_run
from flatout.report.model import Gain
from flatout.report.shown import Shown

SCHEMA_VERSION = 1
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""

_KINDS: tuple[FactKind, ...] = get_args(FactKind)


@dataclass(frozen=True, repr=False)
class Comparison(ComparisonData, Shown):
    """Comparison of two runs: :class:`ComparisonData` with its text and files.

    ``print(comparison)`` prints text, and ``rich.print(comparison)`` prints text in color.
    """

    _TITLE = "flatout compare"

    def is_slower_than(self, ratio: float) -> bool:
        """Return True if a loop of the second run is surely slower than ``ratio`` times the first run's loop.

        Args:
            ratio: speed relative to the first run. The upper end of the 95 % interval must lie below ``ratio``.
        """
        return any(loop.speed.interval is not None and loop.speed.high < ratio for loop in self.loops)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "flatout.comparison", "schema_version": SCHEMA_VERSION, **serialize.plain(self)}

    def _facts(self) -> dict[str, str]:
        answers = {loop.name or "answer": comparison_text.answer(loop) for loop in self.loops}
        changed = ", ".join(dict.fromkeys(change.kind for change in self.changes))
        return {**answers, "changed": f"changed: {changed}" if changed else ""}

    def _fragment(self) -> Markup:
        return Markup("<pre>{}</pre>").format(str(self))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from comparison_text.render(self, options)

    def __str__(self) -> str:
        return comparison_text.to_text(self)


def compare(a: Source, b: Source) -> Comparison:
    """Compare the speeds of two runs, and list the changes between the runs.

    Both runs must be of one kind: reports of ``flatout.optimize``, reports of ``flatout run`` and ``flatout.auto``, or
    profiles. Speeds are those of the tuned loops, in samples per second. A loop of one run is compared with the loop of
    the same module in the other run.

    If only techniques differ, the untuned loop is the same in both runs. Then a change of the untuned loop's speed
    comes from the machine, and the comparison uses speeds relative to the untuned loop.

    Args:
        a: report or profile of the first run, or the path of its JSON file.
        b: report or profile of the second run, or the path of its JSON file.

    Returns:
        The comparison.

    Raises:
        ValueError: a source is unusable, the kinds differ, or the runs have no loop in common.
        OSError: a file cannot be read.
    """
    first, second = measured_run(a, "a"), measured_run(b, "b")
    if first.kind != second.kind:
        raise ValueError(
            f"a and b must be of one kind, got a report of {first.kind} and one of {second.kind}. "
            f"Write both by {first.kind}, or both by {second.kind}"
        )
    pairs = _pairs(first.loops, second.loops)
    changes = tuple(dict.fromkeys(change for one, other in pairs for change in _changes(one, other, len(pairs) > 1)))
    recorded = [kind for kind in _KINDS if all(kind in loop.facts for pair in pairs for loop in pair)]
    same = tuple(kind for kind in recorded if kind not in {change.kind for change in changes})
    is_one_training = {*_KINDS} - {*same} <= {"techniques"}
    return Comparison(
        a=_name(a, "a"),
        b=_name(b, "b"),
        loops=tuple(_compared(one, other, is_one_training=is_one_training) for one, other in pairs),
        changes=changes,
        same=same,
        unrecorded=tuple(kind for kind in _KINDS if kind not in recorded),
        disturbed=tuple(
            name for name, run in (("a", first), ("b", second)) if any(loop.is_disturbed for loop in run.loops)
        ),
    )


def _name(source: Source, name: str) -> str:
    return name if isinstance(source, Shown) else str(source)


def _pairs(a: Sequence[MeasuredLoop], b: Sequence[MeasuredLoop]) -> list[tuple[MeasuredLoop, MeasuredLoop]]:
    """Return pairs of loops with one name. Single loops are a pair, because a change of the code may rename a class.

    Raises:
        ValueError: there is no pair.
    """
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    by_name = {loop.name: loop for loop in b}
    pairs = [(loop, by_name[loop.name]) for loop in a if loop.name in by_name]
    if not pairs:
        names = (", ".join(loop.name for loop in loops) for loops in (a, b))
        raise ValueError(f"a and b must have a module in common, got {' and '.join(names)}. Compare runs of one script")
    return pairs


def _changes(a: MeasuredLoop, b: MeasuredLoop, is_one_of_several: bool) -> Iterator[Change]:
    """Yield the facts that differ, of the kinds that both loops record."""
    for kind in _KINDS:
        one, other = a.facts.get(kind), b.facts.get(kind)
        if one is None or other is None:
            continue
        is_common = kind in ("versions", "machine", "code")
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                loop = a.name if is_one_of_several and not is_common else ""
                yield Change(kind, name, one.get(name), other.get(name), loop)


def _compared(a: MeasuredLoop, b: MeasuredLoop, *, is_one_training: bool) -> ComparedLoop:
    scale = 1.0 if a.samples is None or b.samples is None else a.samples / b.samples
    batch, spreads = b.batch.scaled(scale), (a.start_spread, b.start_spread)

    def part(name: str, one: Estimate, other: Estimate, whole: str) -> ComparedPart:
        other = other.scaled(scale)
        return ComparedPart(name, one.ms, other.ms, part_verdict(one, other, a.batch.ms, spreads), whole)

    others = {each.name: each.time for each in b.parts}
    parts = tuple(
        part(each.name, each.time, others[each.name], each.whole)
        for each in a.parts
        if each.name in others and (each.time.ms or others[each.name].ms)
    )
    speed, compared_batch = _whole("batch", a.batch, batch, spreads)
    untuned, drifted = None, False
    if a.untuned is not None and b.untuned is not None:
        _, untuned = _whole("untuned loop", a.untuned, b.untuned.scaled(scale), spreads)
        drifted = is_one_training and untuned.verdict in ("faster", "slower")
        if drifted:
            speed = speed_ratio(a.batch.relative_to(a.untuned), b.batch.relative_to(b.untuned), spreads)
    verdict = speed_verdict(speed)
    return ComparedLoop(
        name=a.name,
        speed=speed,
        verdict=verdict,
        samples=a.samples if b.samples is not None else None,
        batch=compared_batch,
        parts=parts,
        mainly=_largest(parts, faster=verdict == "faster") if verdict in ("faster", "slower") else "",
        untuned=untuned,
        drifted=drifted,
    )


def _whole(name: str, a: Estimate, b: Estimate, spreads: Spreads) -> tuple[Gain, ComparedPart]:
    """Return the ratio of the speeds of two loops, and the times of their batches."""
    speed = speed_ratio(a, b, spreads)
    return speed, ComparedPart(name, a.ms, b.ms, speed_verdict(speed))


def _largest(parts: Sequence[ComparedPart], *, faster: bool) -> str:
    """Return the name of the part whose time changed most in one direction; empty if no part did.

    A part that consists of other parts does not count.
    """
    wholes = {part.whole for part in parts}
    gained = {part.name: (part.a_ms - part.b_ms) * (1 if faster else -1) for part in parts if part.name not in wholes}
    largest = max(gained, key=lambda name: gained[name], default="")
    return largest if largest and gained[largest] > 0 else ""

"""Comparison of two runs: the ratio of their speeds, the times of their parts, and the changes between the runs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from flatout.core import formatting
from flatout.core.cache_folder import is_special
from flatout.report import model
from flatout.report.document import Block, Note, Part, Table
from flatout.report.estimates import (
    DISTURBED_START_SPREAD,
    MARGIN,
    START_SPREAD,
    Estimate,
    Spreads,
    Verdict,
    part_verdict,
    speed_ratio,
    speed_verdict,
)
from flatout.report.model import Gain, Pace, Summary
from flatout.report.shown import Shown

SCHEMA_VERSION = 1
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""

READABLE_SCRIPTS, READABLE_PROFILES = (1,), (2, 3)
"""Readable schema versions of the JSON of scripts and profiles."""

Source = str | PathLike[str] | Shown
"""Report or profile of flatout, or the path of its JSON file."""

FactKind = Literal["code", "model", "data", "batch size", "precision", "optimizer", "techniques", "versions", "machine"]
Facts = Mapping[FactKind, Mapping[str, str]]
"""Facts by kind and name. A kind that the report does not record is missing."""

LONGEST_FACT = 32
"""Largest number of characters of a fact that is shown in full. For longer facts, only differing items are shown."""

_KINDS: tuple[FactKind, ...] = get_args(FactKind)
_VERSIONS = ("torch", "flatout", "python", "cuda", "cudnn")
"""Versions among the facts of an environment. The other facts describe the machine."""

_PARTS = {"loader_wait": "data", "h2d": "copy to device", "host_idle": "rest"}
"""Names of parts by the names of a profile's phases. Parts that are missing here have the names of the phases."""

_WORDS: dict[Verdict | None, tuple[str, str]] = {
    "faster": ("faster", "kept"),
    "slower": ("slower", "slower"),
    "same": ("same", "quiet"),
    "unknown": ("cannot tell", "warn"),
    None: ("measured once", "quiet"),
}
"""Word and style of each verdict."""

_COMMA = re.compile(r", (?![^\[]*\])")
"""Comma between two items, outside of brackets."""


@dataclass(frozen=True)
class MeasuredLoop:
    """Loop of one report.

    Attributes:
        name: class of the loop's module; empty if the report has one loop only.
        samples: samples of a batch; None if unknown.
        batch: time of a batch.
        parts: name and time of each part of a batch, and the name of the part that contains this part, or "".
        untuned: time of a batch before tuning, for the same number of samples; None if unknown.
        facts: facts that may explain a difference.
        is_disturbed: True if other programs competed for the cores.
    """

    name: str
    samples: float | None
    batch: Estimate
    parts: Sequence[tuple[str, Estimate, str]]
    untuned: Estimate | None
    facts: Facts
    is_disturbed: bool = False

    @property
    def start_spread(self) -> float:
        """Spread of the loop's time between starts, relative to the time."""
        return DISTURBED_START_SPREAD if self.is_disturbed else START_SPREAD


@dataclass(frozen=True)
class ComparedPart:
    """Part of a batch's time in both loops.

    Attributes:
        name: such as ``"data"``, ``"step"``, ``"forward"``, or ``"untuned loop"``.
        a_ms: milliseconds in the first loop.
        b_ms: milliseconds in the second loop, for the same number of samples.
        verdict: verdict on the second loop; None if the part was measured once, so that no spread is known.
        whole: name of the part that contains this part; empty for the batch.
    """

    name: str
    a_ms: float
    b_ms: float
    verdict: Verdict | None
    whole: str = ""


@dataclass(frozen=True)
class ComparedLoop:
    """Comparison of a loop that both runs have.

    Attributes:
        name: class of the loop's module; empty if the runs have one loop only.
        speed: speed of ``b`` relative to ``a``. A value of 1.25 is 25 % more samples per second.
        verdict: verdict on the loop of ``b``.
        samples: samples of a batch, to which all times refer; None if unknown.
        batch: time of a batch.
        parts: parts of a batch.
        mainly: name of the part with most of the difference; empty without a significant difference.
        untuned: time of a batch before tuning; None if unknown.
        drifted: True if the untuned loop is the same in both runs but differs in speed. ``speed`` is then relative to
            the untuned loop.
    """

    name: str
    speed: Gain
    verdict: Verdict
    samples: float | None
    batch: ComparedPart
    parts: tuple[ComparedPart, ...]
    mainly: str
    untuned: ComparedPart | None
    drifted: bool


@dataclass(frozen=True)
class Change:
    """Fact that differs between the runs.

    Attributes:
        kind: such as ``"code"`` or ``"versions"``.
        name: such as ``"torch"``, or the name of a class.
        a: fact of the first run; None if the run lacks the fact.
        b: fact of the second run; None if the run lacks the fact.
        loop: name of the loop; empty if all loops of the runs have the change.
    """

    kind: FactKind
    name: str
    a: str | None
    b: str | None
    loop: str = ""


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Comparison of two runs.

    ``print(comparison)`` prints text, and ``rich.print(comparison)`` prints text in color.

    Attributes:
        a: name of the first run.
        b: name of the second run.
        loops: loops that both runs have, at least one.
        changes: facts that differ.
        same: kinds of facts that are recorded and do not differ.
        unrecorded: kinds of facts that a run does not record.
        disturbed: names of the runs that were measured while other programs used the cores.
    """

    _TITLE = "flatout compare"

    a: str
    b: str
    loops: tuple[ComparedLoop, ...]
    changes: tuple[Change, ...]
    same: tuple[FactKind, ...]
    unrecorded: tuple[FactKind, ...]
    disturbed: tuple[str, ...]

    def is_slower_than(self, ratio: float) -> bool:
        """Return True if a loop of the second run is surely slower than ``ratio`` times the first run's loop.

        Args:
            ratio: speed relative to the first run. The upper end of the 95 % interval must lie below ``ratio``.
        """
        return any(loop.speed.interval is not None and loop.speed.high < ratio for loop in self.loops)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "flatout.comparison", "schema_version": SCHEMA_VERSION, **model.plain(self)}

    def _facts(self) -> dict[str, str]:
        answers = {loop.name or "answer": _answer(loop) for loop in self.loops}
        changed = ", ".join(dict.fromkeys(change.kind for change in self.changes))
        return {**answers, "changed": f"changed: {changed}" if changed else ""}

    def _blocks(self) -> Iterator[Block]:
        yield Note(f"a = {self.a}, b = {self.b}", "quiet")
        for loop in self.loops:
            name = f"{loop.name}: " if loop.name and len(self.loops) > 1 else ""
            yield Note((f"{name}{_answer(loop)}", _WORDS[loop.verdict][1].replace("quiet", "strong")))
        if len(self.loops) == 1:
            yield _times(self.loops[0])
        if any(loop.drifted for loop in self.loops):
            yield Note(
                "The untuned loop is the same in both, but its speed changed, so the machine was faster in one run. "
                "The answer compares speeds relative to the untuned loop."
            )
        for run in self.disturbed:
            yield Note(f"Other programs used the cores when {run} was measured.")
        by_kind: dict[FactKind, list[str]] = {}
        for change in self.changes:
            by_kind.setdefault(change.kind, []).append(_change(change))
        for index, (kind, changes) in enumerate(by_kind.items()):
            yield Note(f"{kind}: {'; '.join(changes)}", label=" " if index else "changed")
        for label, kinds in (("same", self.same), ("not recorded", self.unrecorded)):
            if kinds:
                yield Note(", ".join(kinds), label=label)


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
    (kind, first), (other_kind, second) = _measured(a, "a"), _measured(b, "b")
    if kind != other_kind:
        raise ValueError(
            f"a and b must be of one kind, got a report of {kind} and one of {other_kind}. "
            f"Write both by {kind}, or both by {other_kind}"
        )
    pairs = _pairs(first, second)
    changes = tuple(dict.fromkeys(change for one, other in pairs for change in _changes(one, other, len(pairs) > 1)))
    recorded = [kind for kind in _KINDS if all(kind in loop.facts for pair in pairs for loop in pair)]
    same = tuple(kind for kind in recorded if kind not in {change.kind for change in changes})
    is_one_training = {*_KINDS} - {*same} <= {"techniques"}
    return Comparison(
        a="a" if isinstance(a, Shown) else str(a),
        b="b" if isinstance(b, Shown) else str(b),
        loops=tuple(_compared(one, other, is_one_training=is_one_training) for one, other in pairs),
        changes=changes,
        same=same,
        unrecorded=tuple(kind for kind in _KINDS if kind not in recorded),
        disturbed=tuple(name for name, run in (("a", first), ("b", second)) if any(loop.is_disturbed for loop in run)),
    )


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

    others = {name: time for name, time, _ in b.parts}
    parts = tuple(
        part(name, time, others[name], whole)
        for name, time, whole in a.parts
        if name in others and (time.ms or others[name].ms)
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


def _measured(source: Source, name: str) -> tuple[str, tuple[MeasuredLoop, ...]]:
    """Return the command or function that wrote a report or profile, and at least one loop.

    Args:
        source: the report, or the path of its JSON file.
        name: name of the source in errors.

    Raises:
        ValueError: the source is no report of flatout, has an unreadable version, or holds no measured speed.
        OSError: the file cannot be read.
    """
    try:
        data = source.to_dict() if isinstance(source, Shown) else _loaded(Path(source))
        kind, loops = _loops(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{name} must be a report that flatout wrote, got {_described(source)} ({formatting.first_line(error)}). "
            "Write it with run.report.to_json(path), flatout run --json FILE or flatout profile --json FILE"
        ) from error
    if not loops:
        raise ValueError(
            f"{name} must hold a measured speed, got {_described(source)}, whose run timed nothing. "
            "Give tuning more time: flatout.optimize(..., budget=30), or a longer run of the script"
        )
    return kind, loops


def _described(source: Source) -> str:
    return type(source).__name__ if isinstance(source, Shown) else str(source)


def _loaded(path: Path) -> Any:
    if is_special(path):
        raise ValueError("not a regular file")
    return json.loads(path.read_text(encoding="utf-8"))


def _loops(data: Any) -> tuple[str, tuple[MeasuredLoop, ...]]:
    schema = data["schema"]
    if schema == "flatout.script":
        _check(data["schema_version"], READABLE_SCRIPTS)
        summaries = [(each["module"], model.from_dict(each["report"])) for each in data["modules"]]
        return "flatout run", tuple(_loops_of(_numbered(summaries)))
    if "profiled_steps" in data:
        _check(schema, READABLE_PROFILES)
        loop = _loop_of_profile(data)
        return "flatout profile", (loop,) if 0 < loop.batch.ms < math.inf else ()
    return "flatout.optimize", tuple(_loops_of([("", model.from_dict(data))]))


def _check(version: Any, readable: Sequence[int]) -> None:
    if version not in readable:
        raise ValueError(f"its schema version must be {' or '.join(map(str, readable))}, got {version!r}")


def _numbered(summaries: Sequence[tuple[str, Summary]]) -> Iterator[tuple[str, Summary]]:
    """Yield the modules. From the second module of a class on, the name has a number."""
    seen: Counter[str] = Counter()
    for name, summary in summaries:
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name} {seen[name]}"), summary


def _loops_of(summaries: Iterable[tuple[str, Summary]]) -> Iterator[MeasuredLoop]:
    """Yield the loops whose tuned pace is known."""
    for name, summary in summaries:
        pace, before = summary.after, summary.before
        if pace is None or not _is_measured(pace):
            continue
        untuned = None
        if before is not None and _is_measured(before):
            untuned = _total(before).scaled(_samples(pace) / _samples(before))
        facts = _facts(summary, pace)
        yield MeasuredLoop(name, _samples(pace), _total(pace), _parts(pace), untuned, facts, summary.is_busy)


def _is_measured(pace: Pace) -> bool:
    return 0 < pace.total_ms < math.inf and 0 < pace.samples_per_second < math.inf


def _samples(pace: Pace) -> float:
    return pace.samples_per_second * pace.total_ms / 1e3


def _total(pace: Pace) -> Estimate:
    return Estimate.of(pace.total_ms, [load + step for load, step in pace.stretches], trimmed=True)


def _parts(pace: Pace) -> list[tuple[str, Estimate, str]]:
    """Return the parts of a batch. The phases of a step were measured once, so they have no error."""
    loads, steps = [load for load, _ in pace.stretches], [step for _, step in pace.stretches]
    return [
        ("data", Estimate.of(pace.load_ms, loads, trimmed=True), ""),
        ("step", Estimate.of(pace.step_ms, steps, trimmed=True), ""),
        *((name, Estimate(part * pace.step_ms), "step") for name, part in pace.phases.items() if name != "other"),
    ]


def _facts(summary: Summary, pace: Pace) -> Facts:
    """Return the facts of a report. Older reports lack the facts of the training."""
    facts: dict[FactKind, Mapping[str, str]] = {}
    training = summary.training
    if training:
        facts["code"] = summary.code
        facts["model"] = _some(training, "model")
        facts["data"] = _some(training, "loader", "batch")
        facts["precision"] = _some(training, "precision", "deterministic")
        facts["optimizer"] = _some(training, "optimizer", "update")
    facts["batch size"] = {"samples": f"{_samples(pace):.4g}"}
    facts["techniques"] = {row.technique: row.chosen or "on" for row in summary.rows if row.status == "kept"}
    return {**facts, **_environment(summary.environment)}


def _some(facts: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: facts[name] for name in names if name in facts}


def _environment(environment: Mapping[str, str]) -> dict[FactKind, Mapping[str, str]]:
    machine = {name: fact for name, fact in environment.items() if name not in (*_VERSIONS, "date")}
    return {"versions": _some(environment, *_VERSIONS), "machine": machine}


def _loop_of_profile(data: Mapping[str, Any]) -> MeasuredLoop:
    steps, samples = data["steps"], data["samples"] or None
    batch = Estimate.of(1e3 * data["seconds"], [1e3 * step["seconds"] for step in steps], trimmed=False)
    parts = []
    for phase, seconds in data["phases"].items():
        each = [1e3 * step["phases"][phase] for step in steps]
        parts.append((_PARTS.get(phase, phase), Estimate.of(1e3 * seconds, each, trimmed=False), ""))
    return MeasuredLoop("", samples, batch, parts, None, _environment(data["environment"]))


def _answer(loop: ComparedLoop) -> str:
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


def _times(loop: ComparedLoop) -> Table:
    """Return rates and times of one loop."""
    rows: list[list[Part]] = []
    for part in (*loop.parts, loop.batch, *filter(None, [loop.untuned])):
        times = formatting.milliseconds(part.a_ms), formatting.milliseconds(part.b_ms)
        rows.append([f"{'    ' if part.whole else '  '}{part.name}", *times, _WORDS[part.verdict]])
    unit = "batch" if loop.samples is None else f"{loop.samples:.4g} samples"
    return Table(rows, [f"time of {unit}", "a", "b", ""], frozenset({1, 2}))


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

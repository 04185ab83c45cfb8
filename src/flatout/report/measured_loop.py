"""Measured loops: the times and facts that a comparison reads from each kind of report."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from flatout.core.cache_folder import is_special
from flatout.core.formatting import first_line
from flatout.report import serialize
from flatout.report.estimates import DISTURBED_START_SPREAD, START_SPREAD, Estimate
from flatout.report.model import Pace, Summary
from flatout.report.shown import Shown

Source = str | PathLike[str] | Shown
"""Report or profile of flatout, or the path of its JSON file."""

FactKind = Literal["code", "model", "data", "batch size", "precision", "optimizer", "techniques", "versions", "machine"]
Facts = Mapping[FactKind, Mapping[str, str]]
"""Facts by kind and name. A kind that the report does not record is missing."""

READABLE_SCRIPTS, READABLE_PROFILES = (1,), (2, 3)
"""Readable schema versions of the JSON of scripts and profiles."""

_VERSIONS = ("torch", "flatout", "python", "cuda", "cudnn")
"""Versions among the facts of an environment. The other facts describe the machine."""

_PARTS = {"loader_wait": "data", "h2d": "copy to device", "host_idle": "rest"}
"""Names of parts by the names of a profile's phases. Parts that are missing here have the names of the phases."""


@dataclass(frozen=True)
class LoopPart:
    """Part of a batch's time.

    Attributes:
        name: such as ``"data"``, ``"step"``, ``"forward"``.
        time: estimate of the milliseconds per batch.
        whole: name of the part that contains this part; empty for the batch.
    """

    name: str
    time: Estimate
    whole: str = ""


@dataclass(frozen=True)
class MeasuredLoop:
    """Loop of one report.

    Attributes:
        name: class of the loop's module; empty if the report has one loop only.
        samples: samples of a batch; None if unknown.
        batch: time of a batch.
        parts: parts of a batch.
        untuned: time of a batch before tuning, for the same number of samples; None if unknown.
        facts: facts that may explain a difference.
        load_average: load average of the machine before the tuning; None if unknown.
    """

    name: str
    samples: float | None
    batch: Estimate
    parts: tuple[LoopPart, ...]
    untuned: Estimate | None
    facts: Facts
    load_average: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """True if other programs competed for the cores."""
        cores = self.facts["machine"].get("cores", "")
        return self.load_average is not None and cores.isdecimal() and self.load_average > int(cores)

    @property
    def start_spread(self) -> float:
        """Spread of the loop's time between starts, relative to the time."""
        return DISTURBED_START_SPREAD if self.is_disturbed else START_SPREAD


@dataclass(frozen=True)
class MeasuredRun:
    """Loops of one report.

    Attributes:
        kind: command or function that wrote the report.
        loops: at least one.
    """

    kind: str
    loops: tuple[MeasuredLoop, ...]


def measured_run(source: Source, name: str) -> MeasuredRun:
    """Read a report or a profile.

    Args:
        source: the report, or the path of its JSON file.
        name: name of the source in errors.

    Raises:
        ValueError: the source is no report of flatout, has an unreadable version, or holds no measured speed.
        OSError: the file cannot be read.
    """
    try:
        data = source.to_dict() if isinstance(source, Shown) else _loaded(Path(source))
        run = _run_of(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{name} must be a report that flatout wrote, got {_described(source)} ({first_line(error)}). "
            "Write it with run.report.to_json(path), flatout run --json FILE or flatout profile --json FILE"
        ) from error
    if not run.loops:
        raise ValueError(
            f"{name} must hold a measured speed, got {_described(source)}, whose run timed nothing. "
            "Give tuning more time: flatout.optimize(..., budget=30), or a longer run of the script"
        )
    return run


def _described(source: Source) -> str:
    return type(source).__name__ if isinstance(source, Shown) else str(source)


def _loaded(path: Path) -> Any:
    if is_special(path):
        raise ValueError("not a regular file")
    return json.loads(path.read_text(encoding="utf-8"))


def _run_of(data: Any) -> MeasuredRun:
    schema = data["schema"]
    if schema == "flatout.script":
        _check(data["schema_version"], READABLE_SCRIPTS)
        summaries = [(each["module"], serialize.from_dict(each["report"])) for each in data["modules"]]
        return MeasuredRun("flatout run", tuple(_loops_of(_numbered(summaries))))
    if "profiled_steps" in data:
        _check(schema, READABLE_PROFILES)
        loop = _loop_of_profile(data)
        return MeasuredRun("flatout profile", (loop,) if 0 < loop.batch.ms < math.inf else ())
    return MeasuredRun("flatout.optimize", tuple(_loops_of([("", serialize.from_dict(data))])))


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
        yield MeasuredLoop(name, _samples(pace), _total(pace), _parts(pace), untuned, facts, summary.load_average)


def _is_measured(pace: Pace) -> bool:
    return 0 < pace.total_ms < math.inf and 0 < pace.samples_per_second < math.inf


def _samples(pace: Pace) -> float:
    return pace.samples_per_second * pace.total_ms / 1e3


def _total(pace: Pace) -> Estimate:
    return Estimate.of(pace.total_ms, [load + step for load, step in pace.stretches], trimmed=True)


def _parts(pace: Pace) -> tuple[LoopPart, ...]:
    """Return the parts of a batch. The phases of a step were measured once, so they have no error."""
    loads, steps = [load for load, _ in pace.stretches], [step for _, step in pace.stretches]
    phases = [LoopPart(name, Estimate(share * pace.step_ms), "step") for name, share in pace.phases.items()]
    return (
        LoopPart("data", Estimate.of(pace.load_ms, loads, trimmed=True)),
        LoopPart("step", Estimate.of(pace.step_ms, steps, trimmed=True)),
        *(phase for phase in phases if phase.name != "other"),
    )


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
    parts = [
        LoopPart(
            _PARTS.get(phase, phase),
            Estimate.of(1e3 * seconds, [1e3 * step["phases"][phase] for step in steps], trimmed=False),
        )
        for phase, seconds in data["phases"].items()
    ]
    return MeasuredLoop("", samples, batch, tuple(parts), None, _environment(data["environment"]))

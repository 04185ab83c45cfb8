"""Data model of a report: plain, frozen data for all renderings, and its JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flatout.core import formatting
from flatout.core.breaks import Break
from flatout.core.described import Described
from flatout.data.stages import Stage

Status = Literal["kept", "rejected", "not applicable", "not tried", "advice"]

Statistic = Literal["wall", "cpu"]
"""Time that is compared: wall time or CPU time."""

SCHEMA_VERSION = 2
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""

READABLE_VERSIONS = (1, SCHEMA_VERSION)
"""Versions that can be read. In version 1, ``Gain.ratio`` and ``Trial.candidate_ms`` are medians."""


ON_CORE = 0.8
"""Least CPU time of a step on the CPU, relative to its wall time, on a machine without other programs.

Without other programs, at least one thread computes all the time, which gives 1. Two programs for a core give 0.5.
"""


@dataclass(frozen=True)
class Gain:
    """Speed of the candidate relative to the baseline: 1.25 is 25 % more steps per second.

    Attributes:
        ratio: geometric mean over the paired trials of baseline time / candidate time.
        low: lower end of the 95 % interval of the ratio. There is no interval if an end is infinite or both are equal.
        high: upper end.
    """

    ratio: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the interval; None if too few pairs were timed for an interval."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            return None
        return self.low, self.high


@dataclass(frozen=True)
class Trial:
    """One candidate measured against the baseline, interleaved in one process.

    Attributes:
        candidate: label of the candidate, e.g. ``"bf16"`` or ``"2 workers"``.
        baseline_ms: median step (or load + step) time of the baseline, milliseconds.
        candidate_ms: ``baseline_ms`` divided by the ratio of ``gain``. Reports of version 1 have the median, which
            may disagree with ``gain``. ``paired_ms`` always agrees.
        gain: the paired ratio with its interval; None when the candidate failed before it could be timed.
        pairs: number of paired measurements.
        baseline_bytes: peak memory of a step of the baseline, beyond parameters, gradients and optimizer state; None
            if not measured.
        candidate_bytes: the same for the candidate.
        setup_seconds: cost of the setup before the first timed step (compilation, caching), seconds.
        break_even_steps: steps after which the setup has paid off; None if it never does or costs nothing.
        loss_difference: mean relative difference of the loss trajectory from the baseline's, for techniques that
            change numerics; None for other techniques, and if no loss was compared.
        output_difference: the same for the output tensor that differs most.
        gradient_difference: the same for the gradient that differs most.
        failure: reason for a rejection before or despite the timing; empty otherwise.
        noise: standard deviation of the log ratio of neighboring blocks of the baseline; None if unknown.
    """

    candidate: str
    baseline_ms: float
    candidate_ms: float
    gain: Gain | None
    pairs: int
    baseline_bytes: int | None = None
    candidate_bytes: int | None = None
    setup_seconds: float = 0.0
    break_even_steps: float | None = None
    loss_difference: float | None = None
    output_difference: float | None = None
    gradient_difference: float | None = None
    failure: str = ""
    noise: float | None = None

    @property
    def paired_ms(self) -> float:
        """Time of the candidate that agrees with ``baseline_ms`` and ``gain``; ``candidate_ms`` without a gain."""
        if self.gain is None or not self.gain.ratio > 0:
            return self.candidate_ms
        return self.baseline_ms / self.gain.ratio

    @property
    def memory(self) -> float | None:
        """Memory of a step with the candidate, relative to the baseline's; None if not measured."""
        if self.candidate_bytes is None or not self.baseline_bytes:
            return None
        return self.candidate_bytes / self.baseline_bytes


@dataclass(frozen=True, repr=False)
class Row(Described):
    """One line of the checklist.

    Attributes:
        technique: name in ``optimize(techniques={...})``.
        number: number in the checklist; None for a technique outside the checklist.
        title: name in the report.
        status: see ``Status``.
        why: reason for the status, in one sentence for readers who do not know the technique.
        chosen: label of the kept candidate, empty otherwise.
        gain: gain of the kept (or best rejected) candidate; None if nothing was timed.
        trials: trials of all candidates.
        memory: memory of a step with the candidate of ``gain``, relative to the baseline; None if not measured.
        expected: gain according to the literature; empty if unknown.
        purpose: effect of the technique, in one sentence; empty if unknown.
        left_out: True if ``techniques=`` or a plan forbids the technique.
        stages: stages of loading, in the row that names them.
    """

    technique: str
    number: int | None
    title: str
    status: Status
    why: str
    chosen: str = ""
    gain: Gain | None = None
    trials: tuple[Trial, ...] = ()
    memory: float | None = None
    expected: str = ""
    purpose: str = ""
    left_out: bool = False
    stages: tuple[Stage, ...] = ()

    def _facts(self) -> dict[str, str]:
        return {
            "technique": self.technique,
            "status": f"{self.status} {self.chosen}",
            "gain": "" if self.gain is None else formatting.percent(self.gain.ratio),
            "why": self.why,
        }

    @property
    def gain_pairs(self) -> int | None:
        """Number of pairs that ``gain`` was measured with; None if no trial has this gain."""
        return next((trial.pairs for trial in self.trials if trial.gain is not None and trial.gain == self.gain), None)

    @property
    def chosen_trial(self) -> Trial | None:
        """Trial of the chosen candidate; None without a chosen candidate or without its trial."""
        return next((trial for trial in self.trials if self.chosen and trial.candidate == self.chosen), None)


@dataclass(frozen=True, repr=False)
class RankPace(Described):
    """Mean times of one rank in a batch of a data-parallel training.

    Attributes:
        rank: number of the rank.
        host: name of the rank's machine.
        device: device of the rank, e.g. ``"cuda:1"``.
        load_ms: waiting for the next batch, milliseconds. Trials do not wait, because their batches are on the device.
        compute_ms: from the beginning of the forward until this rank has its own gradients, milliseconds.
        wait_ms: from this moment until the gradients of all ranks have arrived, milliseconds.
        mfu: model FLOPs utilization of the rank's device, 0..1; None if unknown.
    """

    rank: int
    host: str
    device: str
    load_ms: float
    compute_ms: float
    wait_ms: float
    mfu: float | None = None

    @property
    def own_ms(self) -> float:
        """Time of loading and computing, milliseconds. All ranks wait for the rank with the largest time."""
        return self.load_ms + self.compute_ms

    def _facts(self) -> dict[str, str]:
        return {
            "rank": f"rank {self.rank}",
            "place": f"{self.host} {self.device}",
            "load": f"loading {formatting.milliseconds(self.load_ms)}",
            "compute": f"computing {formatting.milliseconds(self.compute_ms)}",
            "wait": f"waiting {formatting.milliseconds(self.wait_ms)}",
            "mfu": "" if self.mfu is None else f"MFU {formatting.share(self.mfu, 1)}",
        }


@dataclass(frozen=True)
class Pace:
    """Speed of a loop: means over a trial of one configuration, without the slowest and the fastest quarter.

    Attributes:
        step_ms: forward, backward and update, milliseconds.
        load_ms: waiting for the next batch, milliseconds.
        samples_per_second: samples of a batch on all ranks, divided by the time of a batch.
        mfu: model FLOPs utilization of all devices, 0..1, relative to the peak in the used precision; None if unknown.
        phases: shares of ``step_ms``: ``"forward"``, ``"backward"``, ``"update"``, ``"other"``; empty if unknown.
        step_bytes: peak memory of a step, beyond parameters, gradients and optimizer state; None if unknown.
        loader_per_second: samples per second of the loader alone, without steps between batches; None if unknown.
        cpu_ms: CPU time of this process in ``step_ms``, summed over its threads, milliseconds; None if unknown.
        exposed_ms: exposed communication in ``step_ms``: time that averaging the gradients over all ranks adds to a
            step, milliseconds; None in a training of one process, and if unknown.
        stretches: ``(load_ms, step_ms)`` of each stretch of training in the means; empty if unknown. The spread of the
            stretches gives the uncertainty of the means.
        ranks: times of each rank in these steps, by rank; empty in a training of one process.
        scaling: efficiency of weak scaling, 0..1: speed of a rank relative to one rank that trains while the others
            rest; None if unknown.
    """

    step_ms: float
    load_ms: float
    samples_per_second: float
    mfu: float | None = None
    step_bytes: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    loader_per_second: float | None = None
    cpu_ms: float | None = None
    exposed_ms: float | None = None
    stretches: tuple[tuple[float, float], ...] = ()
    ranks: tuple[RankPace, ...] = ()
    scaling: float | None = None

    def scaled(self, times: float) -> Pace:
        """Return the same pace with times for a multiple of the samples."""
        cpu_ms = None if self.cpu_ms is None else times * self.cpu_ms
        stretches = tuple((times * load_ms, times * step_ms) for load_ms, step_ms in self.stretches)
        step_ms, load_ms = times * self.step_ms, times * self.load_ms
        return replace(self, step_ms=step_ms, load_ms=load_ms, cpu_ms=cpu_ms, stretches=stretches)

    def with_faster_steps(self, gain: float) -> Pace:
        """Return the pace of a loop whose steps are ``gain`` times as fast. The wait for batches stays the same."""
        faster = replace(self, step_ms=self.step_ms / gain, stretches=())
        return replace(faster, samples_per_second=self.samples_per_second * self.total_ms / faster.total_ms)

    @property
    def total_ms(self) -> float:
        """Time of a batch, waiting and step, milliseconds."""
        return self.load_ms + self.step_ms

    @property
    def step_per_second(self) -> float:
        """Samples per second of the step alone, without waiting for batches; NaN if unknown."""
        return self.samples_per_second * self.total_ms / self.step_ms if self.step_ms > 0 else math.nan

    @property
    def load_fraction(self) -> float:
        """Share of the time that is spent waiting for the next batch, 0..1."""
        return self.load_ms / self.total_ms


@dataclass(frozen=True, repr=False)
class Summary(Described):
    """Content of a report.

    Attributes:
        rows: rows of the checklist in order, then rows without a number.
        environment: conditions of the figures by name, such as device, versions and cores.
        before: pace of the original loop; None if nothing was measured.
        after: pace of the loop with all kept techniques; None if nothing was measured.
        tuning_seconds: duration of the tuning.
        notes: sentences that belong to no row.
        verdict: sentences on the tuned loop's utilization of the device, and on the loop's limit.
        won: names of the techniques that a trial kept, in order. Each was timed with the earlier ones in use.
        gain: speed of the tuned loop relative to the original loop, from the race of the two; None without a race.
        gain_statistic: time that ``gain`` compares. CPU time if CPU time is much less noisy than wall time.
        epoch_samples: samples of an epoch; None if the loader has no known length.
        training: facts on model, data, batches, optimizer, update and precision, by name. Empty in older reports.
        code: hash of the source of each function and class of the user, by name. Empty in older reports.
        load_average: load average of the machine before the tuning; None if unknown.
    """

    rows: tuple[Row, ...]
    environment: dict[str, str]
    before: Pace | None = None
    after: Pace | None = None
    tuning_seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    verdict: str = ""
    won: tuple[str, ...] = ()
    gain: Gain | None = None
    gain_statistic: Statistic = "wall"
    epoch_samples: int | None = None
    training: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    load_average: float | None = None

    @property
    def in_use(self) -> tuple[Row, ...]:
        """Rows of the techniques in use, and of the rules."""
        return tuple(row for row in self.rows if row.status == "kept")

    @property
    def rules(self) -> tuple[Row, ...]:
        """Rows in use that neither a trial nor the user has chosen. They apply to every training."""
        return tuple(
            row for row in self.in_use if row.gain is None and not row.chosen and row.technique not in self.won
        )

    @property
    def is_busy(self) -> bool:
        """True if other programs competed for the cores while the loop was measured.

        The load average shows them, and so does a step on the CPU that has less CPU time than wall time.
        """
        cores = self.environment.get("cores", "")
        if self.load_average is not None and cores.isdecimal() and self.load_average > int(cores):
            return True
        computes_here = self.environment.get("device", "").startswith("cpu")
        paces = [pace for pace in (self.before, self.after) if pace is not None and not pace.ranks]
        return computes_here and any(p.cpu_ms is not None and p.cpu_ms < ON_CORE * p.step_ms for p in paces)

    def _facts(self) -> dict[str, str]:
        return {
            "gain": "" if self.gain is None else f"{self.gain.ratio:.2f}×",
            "rows": f"{len(self.in_use) - len(self.rules)} of {len(self.rows) - len(self.rules)} techniques in use",
            "device": self.environment.get("device", ""),
        }

    def reverted(self, breaks: Sequence[Break]) -> Summary:
        """Return the summary after training has contradicted assumptions of kept techniques.

        These techniques are off, so the gain that was measured with them is left out.
        """
        if not breaks:
            return self
        reasons = {each.technique: f"it was reverted during the training: {each.reason}" for each in breaks}
        rows = tuple(
            replace(row, status="rejected", why=reasons[row.technique], chosen="") if row.technique in reasons else row
            for row in self.rows
        )
        won = tuple(name for name in self.won if name not in reasons)
        if won == self.won:
            return replace(self, rows=rows)
        return replace(self, rows=rows, won=won, gain=None, after=None)

    def epoch_seconds(self, pace: Pace) -> float | None:
        """Return the seconds of an epoch at a pace; None if unknown."""
        if self.epoch_samples is None or not pace.samples_per_second > 0:
            return None
        return self.epoch_samples / pace.samples_per_second

    @property
    def pays_back_after(self) -> float | None:
        """Number of batches after which the gain has paid for the tuning; None without a gain or times."""
        if self.before is None or self.after is None or not self.tuning_seconds > 0:
            return None
        saved = (self.before.total_ms - self.after.total_ms) / 1e3
        return self.tuning_seconds / saved if saved > 0 else None


_ARGUMENTS = {
    "batch_size": "batch_size='auto'",
    "precision": "precision='bf16'",
    "workers": "techniques={'workers': 2}",
}


def argument_of(technique: str) -> str:
    """Return the argument of ``flatout.optimize`` that tries a technique."""
    return _ARGUMENTS.get(technique, f"techniques={{{technique!r}: True}}")


def untried(rows: Iterable[Row], techniques: Iterable[str]) -> list[str]:
    """Return the titles of untried techniques, each with the argument that tries the technique.

    Techniques are omitted if they were kept, rejected or forbidden, if they do not apply, or if they have no row.
    """
    by_name = {row.technique: row for row in rows if row.status == "not tried" and not row.left_out}
    return [f"{formatting.clean(by_name[name].title)} ({argument_of(name)})" for name in techniques if name in by_name]


def to_dict(summary: Summary) -> dict[str, Any]:
    """Return a report as plain dicts, lists, strings and numbers.

    A number that is not finite becomes None, because JSON has only finite numbers. The ends of a gain without an
    interval become None, too.
    """
    return {"schema": SCHEMA_VERSION, **plain(summary)}


def from_json(text: str) -> Summary:
    """Read a report from the JSON text of ``to_dict``, in a version of ``READABLE_VERSIONS``. Ignore unknown fields.

    Raises:
        ValueError: the text is not JSON, not a report, or has an unreadable schema version.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"a report must be JSON: {error}") from error
    return from_dict(data)


def from_dict(data: Any) -> Summary:
    """Read a report from the plain data of ``to_dict``, in a version of ``READABLE_VERSIONS``. Ignore unknown fields.

    Raises:
        ValueError: the data is not a report, or has an unreadable schema version.
    """
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("a report must be a JSON object with the key 'schema'")
    if data["schema"] not in READABLE_VERSIONS:
        known = " or ".join(map(str, READABLE_VERSIONS))
        raise ValueError(f"the report's schema must be {known}, got {data['schema']!r}")
    try:
        return _read(Summary, data)
    except KeyError as error:
        raise ValueError(f"the report lacks the field {error}") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the report has a field of the wrong kind: {error}") from error


def plain(value: Any) -> Any:
    """Return a value of a data model as plain dicts, lists, strings and numbers, as ``to_dict`` does."""
    if isinstance(value, Gain):
        low, high = value.interval or (None, None)
        return {"ratio": plain(value.ratio), "low": low, "high": high}
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read(kind: Any, value: Any) -> Any:
    """Return a value of type ``kind`` from plain data. A missing float becomes its default, or NaN."""
    arguments = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        required = {each.name for each in fields(kind) if _is_required(each)}
        given = {name for name in kinds if value.get(name) is not None}
        return kind(**{name: _read(kinds[name], value[name]) for name in kinds if name in given | required})
    if get_origin(kind) is Literal:
        if value not in arguments:
            raise ValueError(f"a status or statistic must be one of {', '.join(arguments)}; got {value!r}")
        return value
    if isinstance(kind, UnionType):
        return None if value is None else _read(arguments[0], value)
    if get_origin(kind) is tuple:
        return tuple(_read(arguments[0], item) for item in value)
    if arguments:  # a mapping
        return {str(key): _read(arguments[1], item) for key, item in value.items()}
    return math.nan if kind is float and value is None else kind(value)


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING

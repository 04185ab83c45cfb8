"""What a report is made of: plain, frozen data that every rendering (terminal, HTML, JSON) reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Status = Literal["kept", "rejected", "not applicable", "not tried", "advice", "not built yet"]

Statistic = Literal["wall", "cpu"]
"""Time that is compared: wall time or CPU time."""

SCHEMA_VERSION = 1
"""Version of the JSON form; raised whenever a field changes its meaning or goes away."""


@dataclass(frozen=True)
class Gain:
    """Speed of the candidate relative to the baseline: 1.25 is 25 % more steps per second.

    Attributes:
        ratio: geometric mean over the paired trials of baseline time / candidate time.
        low: lower end of the 95 % interval of the ratio. Infinite ends, or ends that are one point, are no interval.
        high: upper end.
    """

    ratio: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval; None where too few pairs were timed for an interval."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            return None
        return self.low, self.high


@dataclass(frozen=True)
class Trial:
    """One candidate measured against the baseline, interleaved in one process.

    Attributes:
        candidate: its label, e.g. ``"bf16"`` or ``"2 workers"``.
        baseline_ms: median step (or load + step) time of the baseline, milliseconds.
        candidate_ms: that time divided by the gain. Reports of earlier versions have the median, which may disagree
            with ``gain``: show ``paired_ms``.
        gain: the paired ratio with its interval; None when the candidate failed before it could be timed.
        pairs: number of paired measurements.
        baseline_bytes: what a step of the baseline allocates at its height, beyond parameters, gradients and optimizer
            state; None where it was not measured.
        candidate_bytes: the same of the candidate.
        setup_seconds: one-off cost before the first timed step (compilation, caching), seconds.
        break_even_steps: steps after which the setup has paid for itself; None when it never does or is free.
        loss_difference: mean relative difference of the loss trajectory from the baseline's, for techniques that
            change numerics; None for the others, and where no loss was compared.
        output_difference: the same of the model's outputs, of the tensor that differs most.
        gradient_difference: the same of the gradients, of the parameter whose differs most.
        failure: why the candidate was dropped before or despite its timing; empty otherwise.
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

    @property
    def paired_ms(self) -> float:
        """Time of the candidate beside ``baseline_ms``, as the paired gain has it; ``candidate_ms`` without a gain."""
        if self.gain is None or not self.gain.ratio > 0:
            return self.candidate_ms
        return self.baseline_ms / self.gain.ratio

    @property
    def memory(self) -> float | None:
        """A step's memory with the candidate, relative to the baseline's; None where it was not measured."""
        if self.candidate_bytes is None or not self.baseline_bytes:
            return None
        return self.candidate_bytes / self.baseline_bytes


@dataclass(frozen=True)
class Row:
    """One line of the checklist.

    Attributes:
        technique: the name that ``optimize(techniques={...})`` knows it by.
        number: its number in the checklist; None for a neighbour of the checklist.
        title: what the report calls it.
        status: see ``Status``.
        why: one sentence a person who never heard of the technique understands.
        chosen: label of the kept candidate, empty otherwise.
        gain: the kept (or best rejected) candidate's gain; None where nothing was timed.
        trials: every candidate that was tried.
        memory: a step's memory with that candidate, relative to without; None where it was not measured.
        expected: the gain that the technique's literature expects; empty where there is none to be had.
        purpose: what the technique does, for whom its title says nothing; empty when not known.
        left_out: whether ``techniques=`` or a plan does without the technique.
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

    @property
    def gain_pairs(self) -> int | None:
        """Number of pairs behind ``gain``; None where no trial has this gain."""
        return next((trial.pairs for trial in self.trials if trial.gain is not None and trial.gain == self.gain), None)

    @property
    def chosen_trial(self) -> Trial | None:
        """The trial of the candidate that was chosen; None where none was, or it was chosen without one."""
        return next((trial for trial in self.trials if self.chosen and trial.candidate == self.chosen), None)


@dataclass(frozen=True)
class Pace:
    """How fast a loop runs: means over a trial of one configuration, the slowest and fastest quarter left out.

    Attributes:
        step_ms: forward, backward and update, milliseconds.
        load_ms: waiting for the next batch, milliseconds.
        samples_per_second: samples of a batch / (load + step).
        mfu: model FLOPs utilisation, 0..1, against the peak in the precision used; None when not known.
        phases: shares of ``step_ms``: ``"forward"``, ``"backward"``, ``"update"``, ``"other"``; empty when not known.
        step_bytes: what a step allocates at its height, beyond parameters, gradients and optimizer state; None when
            not known.
        loader_per_second: samples per second that the loader alone delivers, with no step between batches; None when
            not known.
    """

    step_ms: float
    load_ms: float
    samples_per_second: float
    mfu: float | None = None
    step_bytes: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    loader_per_second: float | None = None

    def scaled(self, times: float) -> Pace:
        """The same pace, with the milliseconds of so many times the samples."""
        return replace(self, step_ms=times * self.step_ms, load_ms=times * self.load_ms)

    @property
    def total_ms(self) -> float:
        """Waiting and step: what a batch takes, milliseconds."""
        return self.load_ms + self.step_ms

    @property
    def step_per_second(self) -> float:
        """Samples per second that the step alone takes, were there no waiting for batches; NaN when not known."""
        return self.samples_per_second * self.total_ms / self.step_ms if self.step_ms > 0 else math.nan

    @property
    def load_fraction(self) -> float:
        """Share of the time that goes to waiting for the next batch, 0..1."""
        return self.load_ms / self.total_ms


@dataclass(frozen=True)
class Summary:
    """Everything that a report shows.

    Attributes:
        rows: the checklist in its order, then the neighbours.
        environment: device, versions, cores: what a figure must be read with.
        before: the user's loop as it came; None when nothing was measured.
        after: the loop with everything kept; None when nothing was measured.
        tuning_seconds: what finding this out cost.
        notes: sentences that belong to no row.
        verdict: what the tuned loop makes of its device, and what limits it, in words.
        won: names of the techniques that a trial kept, in that order; each was timed in the company of those before it.
        gain: speed of the tuned loop relative to the original, from a race of both; None without a race.
        gain_statistic: the time that ``gain`` compares: CPU time if it is much less noisy than wall time.
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

    @property
    def pays_back_after(self) -> float | None:
        """Batches after which the gain has paid for the tuning; None if nothing was gained or timed."""
        if self.before is None or self.after is None or not self.tuning_seconds > 0:
            return None
        saved = (self.before.total_ms - self.after.total_ms) / 1e3
        return self.tuning_seconds / saved if saved > 0 else None

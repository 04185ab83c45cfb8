"""Race of the tuned loop against the original loop, which reverts decisions that make the loop slower."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.report.model import Gain, Pace, Row, Statistic
from flatout.techniques import REGISTRY, StepTechnique, Technique
from flatout.tuning import acceptance
from flatout.tuning.bench import LONG_UPDATE, Bench, off
from flatout.tuning.ledger import Decision
from flatout.tuning.pairs import difference, measure_pairs
from flatout.tuning.ranks import failure_of
from flatout.tuning.statistics import FEWEST_PAIRS, UNKNOWN_NOISE, NoiseFloor, fixed_gain
from flatout.tuning.stopwatch import LoaderComparison, Stopwatch

RACE_PAIRS, MOST_RACE_PAIRS = 5, 12
"""Limits of the number of pairs of a race. The remaining time determines the number. The gain never does."""

LARGE_GAIN = 1.5
"""Gain above which the fewest pairs are enough. Trials must have shown it before. Long updates allow them, too."""


@dataclass(frozen=True)
class Outcome:
    """Result of a race, and what is measured afterwards.

    Attributes:
        before: pace of the original loop; None if not measured.
        after: pace of the tuned loop; None if not measured.
        gain: speed of the tuned loop relative to the original; None without a race.
        gain_statistic: the time that ``gain`` compares.
        verdict: text about the utilization of the device, and about what limits it.
        peak_flops: peak in FLOP/s that MFU refers to; None if unknown.
    """

    before: Pace | None = None
    after: Pace | None = None
    gain: Gain | None = None
    gain_statistic: Statistic = "wall"
    verdict: str = ""
    peak_flops: float | None = None


def race(bench: Bench) -> Outcome:
    """Time the original loop against the tuned loop, and revert decisions until the tuned loop is no slower.

    A trial measures one technique, while the techniques kept before it are on. The race measures the gain of all
    techniques that won a trial. Kept techniques that won none, such as forced ones, are on in both loops. The race
    reverts one technique at a time, and begins with the least certain gain. If no time is left for another race, the
    race reverts all of them.

    If only a loader won a trial, this trial has compared the same two loops. The trial then replaces the race, if no
    time is left for the race.
    """
    budget = bench.budget
    if budget.seconds == 0:
        return Outcome()
    budget.begin_race()
    if (trial := _trial_of_both(bench)) is not None and budget.left < _fewest_pairs(bench) * trial.pair_seconds:
        return Outcome(trial.before, trial.after, trial.gain)
    result = Outcome(bench.pace, bench.pace)
    while bench.ledger.won:
        result = race_once(bench, _fewest_pairs(bench))
        assert result.gain is not None
        if acceptance.verdict(result.gain, bench.known_noise, has_other_merits=True) == "faster":
            return result
        won = bench.ledger.won
        _revert(bench, _least_certain(won) if budget.left > 0 else won, result.gain)
        result = Outcome(bench.pace, bench.pace)
    return result


def shortest_race(bench: Bench) -> float:
    """Return the seconds of a race of the fewest pairs."""
    return _fewest_pairs(bench) * bench.pair_seconds()


def _fewest_pairs(bench: Bench) -> int:
    """Return the fewest pairs of a race. The number depends on earlier trials only, so the interval is valid."""
    gains = [decision.row.gain for decision in bench.ledger.won]
    shown = math.prod(gain.low for gain in gains if gain is not None)
    return FEWEST_PAIRS if shown > LARGE_GAIN or bench.update_seconds > LONG_UPDATE else RACE_PAIRS


def _trial_of_both(bench: Bench) -> LoaderComparison | None:
    """Return the trial of a loader that compared the original loop with the tuned one; None if there is none."""
    trial, data = bench.comparison, bench.job.data
    if trial is None or len(bench.ledger.won) != 1 or trial.old is not data.loader:
        return None
    return trial


def race_once(bench: Bench, fewest: int = RACE_PAIRS) -> Outcome:
    """Time the original and the tuned loop in a number of pairs that the remaining time fixes. Nothing is reverted.

    Args:
        bench: the training.
        fewest: lower limit of the number of pairs.
    """
    if not bench.ledger.won:
        return Outcome(bench.pace, bench.pace)
    bench.rewind()
    try:
        return _measure(bench, fewest)
    finally:
        bench.rewind()


def _measure(bench: Bench, fewest: int) -> Outcome:
    candidates = [decision.candidate for decision in bench.ledger.won if decision.candidate is not None]
    scale = math.prod(candidate.scale for candidate in candidates)
    statistic, floors = _statistic_and_floors(bench)
    new = bench.watch()
    with off(*candidates):
        old = Stopwatch(bench.job, bench.job.data.loader) if _has_other_loader(bench) else bench.watch()
    computes_itself = old.queue == new.queue == 0
    with bench.loops(old, new, candidates, scale) as loops:
        begun = bench.ranks.now()
        measured = measure_pairs(*loops, alternates=bench.is_slow and not computes_itself, ranks=bench.ranks)
        pairs = [next(measured)]
        affordable = bench.budget.left / 2 / (bench.ranks.now() - begun)
        count = max(fewest, int(min(MOST_RACE_PAIRS, 1 + affordable)))
        for pair in itertools.islice(measured, count - 1):
            pairs.append(pair)
            if len(pairs) >= fewest and bench.budget.left == 0:  # later pairs took longer than the first
                break
    statistic = statistic if computes_itself else "wall"
    gain = fixed_gain([difference(pair, statistic) for pair in pairs], floors[statistic])
    return Outcome(old.pace.scaled(scale), new.pace, gain, statistic)


def _statistic_and_floors(bench: Bench) -> tuple[Statistic, Mapping[Statistic, NoiseFloor]]:
    """Return the time to compare, and the noise floors of both loops. Steps do not show the noise of other loaders."""
    if _has_other_loader(bench):
        return "wall", {"wall": UNKNOWN_NOISE if bench.comparison is None else bench.comparison.floor}
    noise = bench.noise
    floors = {**noise.floors, "wall": noise.mean}
    return noise.statistic(keeps_cpu_time=_keep_cpu_time(bench.ledger.won)), floors


def _has_other_loader(bench: Bench) -> bool:
    """Return True if a trial has replaced the loader."""
    return any(decision.candidate is None for decision in bench.ledger.won)


def _keep_cpu_time(won: Sequence[Decision]) -> bool:
    """Return True if the CPU time of a step with all candidates is comparable with that of a step without."""
    techniques = [_technique_of(decision) for decision in won]
    return all(isinstance(technique, StepTechnique) and technique.keeps_cpu_time for technique in techniques)


def _has_setup(decision: Decision) -> bool:
    """Return True if the candidate of a decision compiles or records code."""
    technique = _technique_of(decision)
    return isinstance(technique, StepTechnique) and not technique.is_combinable


def _technique_of(decision: Decision) -> Technique:
    return next(technique for technique in REGISTRY if technique.name == decision.technique)


def _least_certain(won: Sequence[Decision]) -> Sequence[Decision]:
    """Return the group of decisions whose gain has the lowest lower bound.

    The loader's decisions are one group. The two decisions of a pair are also one group, because only the first has a
    gain.
    """
    groups: list[list[Decision]] = []
    for decision in won:
        is_loader = decision.candidate is None
        loaders = next((group for group in groups if group[0].candidate is None), None)
        if is_loader and loaders is not None:
            loaders.append(decision)
        elif decision.row.gain is None and groups:
            groups[-1].append(decision)
        else:
            groups.append([decision])
    return min(groups, key=lambda group: 0.0 if group[0].row.gain is None else group[0].row.gain.low)


def _revert(bench: Bench, decisions: Sequence[Decision], gain: Gain) -> None:
    """Turn off kept techniques, and reject them in the report.

    Techniques that were tried with another number of samples, or that stop working, are reverted, too.
    """
    why = f"helped alone, but the tuned loop was not shown to be as fast as the original: {gain.ratio:.2f}×"

    def rejected(row: Row) -> Row:
        return replace(row, status="rejected", chosen="", why=why)

    won = bench.ledger.won
    first_resized = next(
        (i for i, d in enumerate(won) if d in decisions and d.candidate is not None and d.candidate.resizes), len(won)
    )
    decisions = [d for i, d in enumerate(won) if d in decisions or i > first_resized]
    for candidate in reversed(bench.ledger.candidates):
        candidate.disable()
    bench.ledger.revert(decisions, rejected)
    for candidate in bench.ledger.candidates:
        candidate.enable()
    if any(decision.candidate is None for decision in decisions):
        bench.use(bench.job.data.loader)
    bench.forget()
    if any(_has_setup(decision) for decision in bench.ledger.decisions if decision.candidate is not None):
        for batch in bench.job.data.batches:  # code that was compiled for the reverted techniques compiles again
            bench.job.stepper.step(batch)
    broken = [d for d in bench.ledger.won if d.candidate is not None and failure_of(bench.ranks, d.candidate)]
    if broken:
        _revert(bench, broken, gain)

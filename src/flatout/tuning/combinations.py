"""Combinations of factors, which are tried and decided together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce

from flatout.core.errors import Unsuitable
from flatout.report.model import Gain, Trial
from flatout.techniques import (
    Candidate,
    Measured,
    NotApplicable,
    PairCandidate,
    StepTechnique,
)
from flatout.tuning.acceptance import earns, is_open, ratio, saves_memory, verdict
from flatout.tuning.bench import Bench
from flatout.tuning.ledger import Decision
from flatout.tuning.numerics import verify
from flatout.tuning.pairs import Pair, difference
from flatout.tuning.ranks import failure_of, same_candidates
from flatout.tuning.statistics import LATE, Factorial
from flatout.tuning.stopwatch import Block
from flatout.tuning.trials import Screening, attempt, screen
from flatout.tuning.tuner import Tuner

MOST_PAIRS = 100


@dataclass(frozen=True, eq=False)
class Factor:
    """Candidate that any combination may turn on.

    Attributes:
        techniques: one technique, or the two techniques of a pair.
        candidate: turns the factor on and off.
        pair: two blocks. The factor is on in the second block.
        instead_of: the factor that is on in the first block; None if none is.
        screened: record of its screening.
    """

    techniques: tuple[StepTechnique, ...]
    candidate: Candidate
    pair: Pair
    instead_of: Factor | None
    screened: Trial


class CombinationTrials:
    """Trials of combinations of factors.

    Args:
        bench: the training.
        groups: alternatives of each technique, of which a combination has at most one. All passed their screening.
    """

    def __init__(self, bench: Bench, groups: Sequence[Sequence[Factor]]) -> None:
        self._bench = bench
        self._factors = [factor for group in groups for factor in group]
        self._statistic = bench.noise.statistic(
            keeps_cpu_time=all(t.keeps_cpu_time for factor in self._factors for t in factor.techniques)
        )
        self._factorial = Factorial(groups, bench.noise.floors[self._statistic], ranks=bench.ranks)
        self._block = bench.blocks()

    def run(self, deadline: float) -> list[Factor]:
        """Try combinations until every factor is decided or the time is up, and return the factors that pay.

        Args:
            deadline: ``Agreement.now()`` after which no pair starts.
        """
        factorial = self._factorial
        for factor in self._factors:
            others = [] if factor.instead_of is None else [factor.instead_of]
            factorial.add([factor], others, difference(factor.pair, self._statistic))
        self._bench.rewind()
        for i in range(MOST_PAIRS):
            if not factorial.open or self._bench.ranks.now() > deadline:
                break
            one, other = factorial.combinations()
            try:
                with self._bench.ranks.attempt():
                    first, second = self._measure(one, i), self._measure(other, i)
            except Exception:  # each factor runs alone, so the combination is at fault, and open factors stay undecided
                break
            factorial.add(one, other, difference((second, first), self._statistic))
        self._bench.rewind()
        factorial.close()
        return [factor for factor in self._factors if factor in factorial.kept]

    def record(self, factor: Factor, baseline_ms: float) -> Trial:
        """Return the record of a factor for the report.

        Args:
            factor: one of the factors.
            baseline_ms: milliseconds of a step without the factor.
        """
        estimate = self._factorial.estimates()[factor]
        gain = Gain(math.exp(estimate.mean), math.exp(estimate.low(LATE)), math.exp(estimate.high(LATE)))
        return replace(
            factor.screened,
            baseline_ms=baseline_ms,
            candidate_ms=baseline_ms / gain.ratio,
            gain=gain,
            pairs=self._factorial.pairs_of(factor),
            failure=failure_of(self._bench.ranks, factor.candidate),
        )

    def _measure(self, on: Collection[Factor], i: int) -> Block:
        with ExitStack() as stack:
            for factor in self._factors:
                if factor in on:
                    stack.enter_context(factor.candidate)
            return self._block(i)


SHARE = 0.5
"""Least share of the remaining time for factors, even if the other techniques need more."""

FEWEST_COMBINATIONS = 2
"""Number of pairs of combinations for which screening leaves time."""


def decide_factors(tuner: Tuner, bench: Bench, measured: Iterable[Measured]) -> set[str]:
    """Decide combinable techniques together, if there are at least two, and return the names of the decided techniques.

    Each candidate is screened first: it must run, compute the same, and take at most a multiple of a step's time.
    """
    combinable = [t for t in measured if isinstance(t, StepTechnique) and t.may_combine(bench.job)]
    techniques = [technique for technique in combinable if tuner.may_try(technique)]
    if len(techniques) < 2:
        return set()
    left = bench.budget.left
    stage = _Stage(bench, techniques, bench.ranks.now() + max(SHARE * left, left - bench.budget.later))
    stage.screen()
    return stage.decide()


class _Stage:
    """Stage of the factors of one job.

    Args:
        bench: the training.
        techniques: techniques to decide.
        deadline: ``Agreement.now()`` after which no trial starts.
    """

    def __init__(self, bench: Bench, techniques: list[StepTechnique], deadline: float) -> None:
        self.techniques = techniques
        self._bench = bench
        self._deadline = deadline
        self._candidates: dict[str, list[Candidate]] = {}
        self._records: dict[str, list[Trial]] = {technique.name: [] for technique in techniques}
        self._factors: list[Factor] = []

    def screen(self) -> None:
        """Screen each candidate, and pairs with companions, while there is time.

        The largest expected gain comes first. Techniques that do not apply are removed.
        """
        for technique in sorted(self.techniques, key=lambda technique: -technique.optimistic_gain):
            try:
                found = same_candidates(self._bench.ranks, lambda t=technique: t.candidates(self._bench.job))  # type: ignore[misc]
                self._candidates[technique.name] = candidates = list(found)
                for candidate in candidates:
                    self._screen(candidate, technique)
            except (NotApplicable, Unsuitable):
                self.techniques.remove(technique)
                self._factors = [factor for factor in self._factors if technique not in factor.techniques]
        for technique in self.techniques:
            for companion in self._companions(technique):
                for first in self._working(technique):
                    for second in self._candidates_beside(first, companion):
                        label = f"{first.label} + {companion.title} {second.label}"
                        self._screen(PairCandidate(first, second, label), technique, companion)
        self._bench.rewind()

    def _working(self, technique: StepTechnique) -> list[Candidate]:
        """Return the candidates that did not fail, even if they are slow alone."""
        failed = {record.candidate for record in self._records[technique.name] if record.failure}
        return [candidate for candidate in self._candidates[technique.name] if candidate.label not in failed]

    def _candidates_beside(self, first: Candidate, companion: StepTechnique) -> Sequence[Candidate]:
        """Return the companion's candidates while another candidate is on, for example in another precision."""

        def beside() -> Sequence[Candidate]:
            with first:
                return companion.candidates(self._bench.job)

        try:
            return same_candidates(self._bench.ranks, beside)
        except (NotApplicable, Unsuitable):
            return ()

    def _companions(self, technique: StepTechnique) -> list[StepTechnique]:
        return [companion for companion in self.techniques if companion.name in technique.companions]

    def _screen(self, candidate: Candidate, *techniques: StepTechnique) -> None:
        bench, found = self._bench, list[Screening]()
        if bench.ranks.now() > self._deadline - FEWEST_COMBINATIONS * 2 * bench.block_seconds:
            return

        def trial() -> Trial:
            found.append(screen(bench, candidate, techniques))
            if found[0].is_hopeless or found[0].trial.failure or not bench.measures_memory:
                return found[0].trial
            return replace(found[0].trial, baseline_bytes=bench.memory, candidate_bytes=bench.memory_with(candidate))

        record = attempt(bench, candidate.label, trial)
        if found and not found[0].is_hopeless and not record.failure:
            pair, earlier = found[0].pair, None
            if found[0].is_apart and self._factors:
                earlier = self._factors[-1]
                pair = (earlier.pair[1], pair[1])
            self._factors.append(Factor(techniques, candidate, pair, earlier, record))
        else:
            self._records[techniques[0].name].append(record)

    def decide(self) -> set[str]:
        """Try combinations, keep the factors that help, and return the names of the decided techniques."""
        if self._factors:
            self._try_combinations()
        for technique in self.techniques:
            if not self._bench.ledger.is_kept(technique.name):
                row = technique.row("kept", technique.rationale_on(self._bench.job))
                trials = self._records[technique.name]
                self._bench.ledger.add(Decision(verdict(row, trials, None), is_open=is_open(trials)))
        return {technique.name for technique in self.techniques}

    def _try_combinations(self) -> None:
        bench, baseline_ms = self._bench, self._bench.pace.step_ms
        trials = CombinationTrials(bench, self._groups())
        paying = trials.run(self._deadline)
        records = {factor: trials.record(factor, baseline_ms) for factor in self._factors}
        for factor, record in records.items():
            if _is_free(factor, paying) and saves_memory(record):
                paying.append(factor)
        paying = self._equivalent(paying, records)
        for factor in paying:  # the baseline of each factor is the step with all earlier factors
            records[factor] = trials.record(factor, baseline_ms)
            baseline_ms = records[factor].candidate_ms
        for factor, record in records.items():
            self._records[factor.techniques[0].name].append(record)
        for factor in paying:
            self._keep(factor, records[factor])

    def _keep(self, factor: Factor, record: Trial) -> None:
        """Keep a factor. The companion's row in a pair refers to the technique's row."""
        bench, (technique, *companions) = self._bench, factor.techniques
        parts = factor.candidate.parts if isinstance(factor.candidate, PairCandidate) else (factor.candidate,)
        why = technique.rationale_on(bench.job)
        if companions and not any(map(earns, self._alone(technique))):
            why = f"{why}; it pays in the company of {companions[0].title} alone"
        row = verdict(technique.row("kept", why), self._records[technique.name], record)
        bench.keep(Decision(row, "trial", parts[0].value, parts[0]))
        for companion, part in zip(companions, parts[1:], strict=True):
            why = companion.rationale_on(bench.job)
            why = f"{why}; tried together with {technique.title}, whose row has the gain of both"
            bench.keep(Decision(companion.row("kept", why, part.label), "trial", part.value, part))

    def _alone(self, technique: StepTechnique) -> list[Trial]:
        labels = {candidate.label for candidate in self._candidates[technique.name]}
        return [record for record in self._records[technique.name] if record.candidate in labels]

    def _groups(self) -> list[list[Factor]]:
        """Return alternatives: factors of one technique, of companions, and of techniques that exclude each other."""
        groups: dict[str, list[Factor]] = {}
        group_of: dict[str, str] = {}
        for technique in self.techniques:
            group = group_of.get(technique.alternative_to, group_of.get(technique.name, technique.name))
            for each in (technique, *self._companions(technique)):
                group_of[each.name] = group
        for factor in self._factors:
            groups.setdefault(group_of[factor.techniques[0].name], []).append(factor)
        return list(groups.values())

    def _equivalent(self, paying: list[Factor], records: Mapping[Factor, Trial]) -> list[Factor]:
        """Remove factors, the smallest gain first, until the rest together computes the same as the baseline."""
        while len(paying) > 1:
            together = reduce(lambda a, b: PairCandidate(a, b, ""), [factor.candidate for factor in paying])
            if self._passes(together, [technique for factor in paying for technique in factor.techniques]):
                break
            paying.remove(min(paying, key=lambda factor: ratio(records[factor])))
        self._bench.rewind()
        return paying

    def _passes(self, candidate: Candidate, techniques: list[StepTechnique]) -> bool:
        """Return True if the model computes the same with a candidate."""
        try:
            with self._bench.ranks.attempt():
                return not verify(self._bench, candidate, techniques).failure
        except Exception:  # the model or a backend may not allow the combination
            return False


def _is_free(factor: Factor, paying: list[Factor]) -> bool:
    """Return True if no paying factor has a technique of this one."""
    taken = {technique.name for other in paying for technique in other.techniques}
    return all(technique.name not in taken for technique in factor.techniques)

"""Combinations of factors, which are tried and decided together.

A factor is a candidate that turns on and off in less than a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce

from flatout.core.errors import Unsuitable
from flatout.core.standard_error import trials as log
from flatout.report.model import Trial
from flatout.techniques import Candidate, NotApplicable, PairCandidate, StepTechnique
from flatout.tuning import acceptance
from flatout.tuning.bench import Bench
from flatout.tuning.ledger import Decision
from flatout.tuning.numerics import verify
from flatout.tuning.pairs import MOST_PAIRS, difference
from flatout.tuning.ranks import failure_of, same_candidates
from flatout.tuning.statistics import FEWEST_FOR_INTERVAL, LATE, Factorial
from flatout.tuning.stopwatch import Block, Measure
from flatout.tuning.trials import Screening, attempt, keep_parts, screen, together_with

LEAST_SHARE = 0.5
"""Least share of the remaining time for factors, even if the other techniques need more."""


class Combinations:
    """Trial that decides combinable techniques together.

    Each candidate is screened first: it must run, compute the same, and take at most a multiple of a step's time.

    Args:
        bench: the training.
        techniques: techniques to decide. A technique that turns out not to apply stays without a decision.
    """

    def __init__(self, bench: Bench, techniques: Sequence[StepTechnique]) -> None:
        self.techniques = list(techniques)
        self._bench = bench
        left = bench.budget.left
        self._deadline = bench.ranks.now() + max(LEAST_SHARE * left, left - bench.budget.later)
        self._candidates: dict[str, list[Candidate]] = {}
        self._records: dict[str, list[Trial]] = {technique.name: [] for technique in techniques}
        self._factors: list[Screening] = []

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
        if bench.ranks.now() > self._deadline - FEWEST_FOR_INTERVAL * 2 * bench.block_seconds:
            return

        def trial() -> Trial:
            found.append(screen(bench, candidate, techniques))
            if found[0].is_hopeless or found[0].trial.failure or not bench.measures_memory:
                return found[0].trial
            return replace(found[0].trial, baseline_bytes=bench.memory, candidate_bytes=bench.memory_with(candidate))

        record = attempt(bench, candidate.label, trial)
        if not found or found[0].is_hopeless or record.failure:
            self._records[techniques[0].name].append(record)
            return
        factor = replace(found[0], trial=record)
        if factor.is_apart and self._factors:  # the block before its own is that of the factor before
            earlier = self._factors[-1]
            factor = replace(factor, pair=(earlier.pair[1], factor.pair[1]), instead_of=earlier)
        self._factors.append(factor)

    def decide(self) -> None:
        """Try combinations, and keep the factors that help."""
        if self._factors:
            self._try_combinations()
        for technique in self.techniques:
            if not self._bench.ledger.is_kept(technique.name):
                row = technique.row("kept", technique.rationale_on(self._bench.job))
                trials = self._records[technique.name]
                self._bench.ledger.add(
                    Decision(acceptance.row_of(row, trials, None), is_open=acceptance.is_open(trials))
                )

    def _try_combinations(self) -> None:
        baseline_ms = self._bench.pace.step_ms
        factorial = self._measured()
        paying = [factor for factor in self._factors if factor in factorial.kept]
        records = {factor: self._record(factorial, factor, baseline_ms) for factor in self._factors}
        for factor, record in records.items():
            if _is_free(factor, paying) and acceptance.saves_memory(record):
                paying.append(factor)
        paying = self._equivalent(paying, records)
        for factor in paying:  # the baseline of each factor is the step with all earlier factors
            records[factor] = self._record(factorial, factor, baseline_ms)
            baseline_ms = records[factor].candidate_ms
        for factor, record in records.items():
            self._records[factor.techniques[0].name].append(record)
        for factor in paying:
            self._keep(factor, records[factor])

    def _measured(self) -> Factorial[Screening]:
        """Measure pairs of combinations until every factor is decided or the time is up."""
        bench = self._bench
        statistic = bench.noise.statistic(
            keeps_cpu_time=all(t.keeps_cpu_time for factor in self._factors for t in factor.techniques)
        )
        floor, block = bench.noise.floors[statistic], bench.blocks()
        factorial = Factorial(self._groups(), floor, ranks=bench.ranks)
        for factor in self._factors:
            others = [] if factor.instead_of is None else [factor.instead_of]
            factorial.add([factor], others, difference(factor.pair, statistic))
        bench.rewind()

        for i in range(MOST_PAIRS):
            if not factorial.open or bench.ranks.now() > self._deadline:
                break
            one, other = factorial.combinations()
            try:
                with bench.ranks.attempt():
                    first, second = self._measure(block, one, i), self._measure(block, other, i)
            except Exception:  # each factor runs alone, so the combination is at fault, and open factors stay undecided
                break
            gain = difference((second, first), statistic)
            factorial.add(one, other, gain)
            if log.isEnabledFor(logging.DEBUG):
                names = [" + ".join(factor.candidate.label for factor in each) or "none" for each in (one, other)]
                log.debug("pair %d: %s against %s, speed %.3f", i + 1, *names, math.exp(gain))
                for factor, estimate in factorial.estimates().items():
                    speed = estimate.gain(LATE)
                    log.debug("  %s: %.3f (%.3f to %.3f)", factor.candidate.label, speed.ratio, speed.low, speed.high)
        bench.rewind()
        factorial.close()
        return factorial

    def _measure(self, block: Measure, on: Collection[Screening], i: int) -> Block:
        with ExitStack() as stack:
            for factor in self._factors:
                if factor in on:
                    stack.enter_context(factor.candidate)
            return block(i)

    def _record(self, factorial: Factorial[Screening], factor: Screening, baseline_ms: float) -> Trial:
        """Return the record of a factor for the report. A step without it takes ``baseline_ms`` milliseconds."""
        gain = factorial.estimates()[factor].gain(LATE)
        return replace(
            factor.trial,
            baseline_ms=baseline_ms,
            candidate_ms=baseline_ms / gain.ratio,
            gain=gain,
            pairs=factorial.pairs_of(factor),
            failure=failure_of(self._bench.ranks, factor.candidate),
            noise=factorial.floor.scale,
        )

    def _keep(self, factor: Screening, record: Trial) -> None:
        """Keep a factor. The companion's row in a pair refers to the technique's row."""
        bench, (technique, *companions) = self._bench, factor.techniques
        why = technique.rationale_on(bench.job)
        if companions and not any(map(acceptance.earns, self._alone(technique))):
            why = f"{why}; it pays in the company of {companions[0].title} alone"
        row = acceptance.row_of(technique.row("kept", why), self._records[technique.name], record)
        others = [(other, f"{other.rationale_on(bench.job)}; {together_with(technique)}") for other in companions]
        keep_parts(bench, row, factor.candidate, *others)

    def _alone(self, technique: StepTechnique) -> list[Trial]:
        labels = {candidate.label for candidate in self._candidates[technique.name]}
        return [record for record in self._records[technique.name] if record.candidate in labels]

    def _groups(self) -> list[list[Screening]]:
        """Return alternatives: factors of one technique, of companions, and of techniques that exclude each other."""
        groups: dict[str, list[Screening]] = {}
        group_of: dict[str, str] = {}
        for technique in self.techniques:
            group = group_of.get(technique.alternative_to, group_of.get(technique.name, technique.name))
            for each in (technique, *self._companions(technique)):
                group_of[each.name] = group
        for factor in self._factors:
            groups.setdefault(group_of[factor.techniques[0].name], []).append(factor)
        return list(groups.values())

    def _equivalent(self, paying: list[Screening], records: Mapping[Screening, Trial]) -> list[Screening]:
        """Remove factors, the smallest gain first, until the rest together computes the same as the baseline."""
        while len(paying) > 1:
            together = reduce(lambda a, b: PairCandidate(a, b, ""), [factor.candidate for factor in paying])
            if self._passes(together, [technique for factor in paying for technique in factor.techniques]):
                break
            paying.remove(min(paying, key=lambda factor: acceptance.ratio(records[factor])))
        self._bench.rewind()
        return paying

    def _passes(self, candidate: Candidate, techniques: list[StepTechnique]) -> bool:
        """Return True if the model computes the same with a candidate."""
        try:
            with self._bench.ranks.attempt():
                return not verify(self._bench, candidate, techniques).failure
        except Exception:  # the model or a backend may not allow the combination
            return False


def _is_free(factor: Screening, paying: list[Screening]) -> bool:
    """Return True if no paying factor has a technique of this one."""
    taken = {technique.name for other in paying for technique in other.techniques}
    return all(technique.name not in taken for technique in factor.techniques)

"""Stage of the switches: techniques that turn on and off in less than a step, decided together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from flatout.core.errors import Unsuitable
from flatout.report.model import Trial
from flatout.techniques import (
    REGISTRY,
    Candidate,
    CompanionTechnique,
    NotApplicable,
    PairCandidate,
    StepTechnique,
)
from flatout.tuning.acceptance import earns, is_open, ratio, saves_memory, verdict
from flatout.tuning.bench import LONG_UPDATE, Bench
from flatout.tuning.ledger import Decision
from flatout.tuning.switch_trials import Switch, SwitchTrials
from flatout.tuning.trial_runner import Look, attempt, differences, look
from flatout.tuning.tuner import Tuner

SHARE = 0.3
"""Least share of the remaining time for combinations of switches, however much the other techniques need."""


def decide_switches(tuner: Tuner, bench: Bench) -> set[str]:
    """Decide switches together, if there are several, and return the names of the decided techniques.

    A combination is tried only of candidates that passed their first look: they run, take at most a multiple of a
    step's time, and compute the same.
    """
    stage = _Stage(bench, [t for t in REGISTRY if isinstance(t, StepTechnique) and t.is_switch and tuner.may_try(t)])
    if len(stage.techniques) < 2:
        return set()
    stage.look()
    return stage.decide()


class _Stage:
    """Switches of one job.

    Args:
        bench: the training.
        techniques: techniques to decide.
    """

    def __init__(self, bench: Bench, techniques: list[StepTechnique]) -> None:
        self.techniques = techniques
        self._bench = bench
        self._candidates: dict[str, list[Candidate]] = {}
        self._records: dict[str, list[Trial]] = {technique.name: [] for technique in techniques}
        self._switches: list[Switch] = []

    def look(self) -> None:
        """Look at each candidate, and at pairs with companions, while the budget lasts.

        Techniques that turn out not to apply are left out.
        """
        for technique in list(self.techniques):
            try:
                self._candidates[technique.name] = candidates = list(technique.candidates(self._bench.job))
                for candidate in candidates:
                    self._look_at(candidate, technique)
            except (NotApplicable, Unsuitable):
                self.techniques.remove(technique)
                self._switches = [switch for switch in self._switches if technique not in switch.techniques]
        for technique in self.techniques:
            for companion in self._companions(technique):
                for first in self._working(technique):
                    for second in self._candidates_beside(first, companion):
                        label = f"{first.label} + {companion.title} {second.label}"
                        self._look_at(PairCandidate(first, second, label), technique, companion)
        self._bench.rewind()

    def _working(self, technique: StepTechnique) -> list[Candidate]:
        """Return the candidates that did not fail, however slow they are alone."""
        failed = {record.candidate for record in self._records[technique.name] if record.failure}
        return [candidate for candidate in self._candidates[technique.name] if candidate.label not in failed]

    def _candidates_beside(self, first: Candidate, companion: StepTechnique) -> Sequence[Candidate]:
        """Return the companion's candidates while another candidate is on, for example in another precision."""
        try:
            with first:
                return companion.candidates(self._bench.job)
        except NotApplicable:
            return ()

    def _companions(self, technique: StepTechnique) -> list[StepTechnique]:
        names = technique.companions if isinstance(technique, CompanionTechnique) else ()
        return [companion for companion in self.techniques if companion.name in names]

    def _look_at(self, candidate: Candidate, *techniques: StepTechnique) -> None:
        bench, found = self._bench, list[Look]()
        if bench.budget.left == 0:
            return

        def trial() -> Trial:
            found.append(look(bench, candidate, techniques))
            if bench.update_seconds > LONG_UPDATE or found[0].is_hopeless or found[0].trial.failure:
                return found[0].trial
            return replace(found[0].trial, baseline_bytes=bench.memory, candidate_bytes=bench.memory_with(candidate))

        record = attempt(bench, candidate.label, trial)
        if found and not found[0].is_hopeless and not record.failure:
            self._switches.append(Switch(techniques, candidate, found[0].pair, record))
        else:
            self._records[techniques[0].name].append(record)

    def decide(self) -> set[str]:
        """Try combinations, keep the switches that pay, and return the names of the decided techniques."""
        if self._switches:
            self._try_combinations()
        for technique in self.techniques:
            if not self._bench.ledger.is_kept(technique.name):
                row = technique.row("kept", technique.rationale_on(self._bench.job))
                trials = self._records[technique.name]
                self._bench.ledger.add(Decision(verdict(row, trials, None), is_open=is_open(trials)))
        return {technique.name for technique in self.techniques}

    def _try_combinations(self) -> None:
        bench, baseline_ms = self._bench, self._bench.pace.step_ms
        trials = SwitchTrials(bench, self._groups())
        seconds = max(SHARE * bench.budget.left, bench.budget.left - bench.budget.later)
        paying = trials.run(time.perf_counter() + seconds)
        records = {switch: trials.record(switch, baseline_ms) for switch in self._switches}
        for switch, record in records.items():
            if _is_free(switch, paying) and saves_memory(record):
                paying.append(switch)
        paying = self._equivalent(paying, records)
        for switch in paying:  # each gain is relative to the step with those before it
            records[switch] = trials.record(switch, baseline_ms)
            baseline_ms = records[switch].candidate_ms
        for switch, record in records.items():
            self._records[switch.techniques[0].name].append(record)
        for switch in paying:
            self._keep(switch, records[switch])

    def _keep(self, switch: Switch, record: Trial) -> None:
        """Keep a switch. The companion's row in a pair refers to the technique's row."""
        bench, (technique, *companions) = self._bench, switch.techniques
        parts = switch.candidate.parts if isinstance(switch.candidate, PairCandidate) else (switch.candidate,)
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

    def _groups(self) -> list[list[Switch]]:
        """Return alternatives: switches of one technique, of companions, and of techniques that exclude each other."""
        groups: dict[str, list[Switch]] = {}
        group_of: dict[str, str] = {}
        for technique in self.techniques:
            group = group_of.get(technique.alternative_to, group_of.get(technique.name, technique.name))
            for each in (technique, *self._companions(technique)):
                group_of[each.name] = group
        for switch in self._switches:
            groups.setdefault(group_of[switch.techniques[0].name], []).append(switch)
        return list(groups.values())

    def _equivalent(self, paying: list[Switch], records: Mapping[Switch, Trial]) -> list[Switch]:
        """Return the switches that compute the same together as the baseline, without the least certain ones."""
        while len(paying) > 1:
            together = reduce(lambda a, b: PairCandidate(a, b, ""), [switch.candidate for switch in paying])
            if self._passes(together, [technique for switch in paying for technique in switch.techniques]):
                break
            paying.remove(min(paying, key=lambda switch: ratio(records[switch])))
        self._bench.rewind()
        return paying

    def _passes(self, candidate: Candidate, techniques: list[StepTechnique]) -> bool:
        """Return True if the model computes the same with a candidate."""
        try:
            return not any(difference.fails for difference in differences(self._bench, candidate, techniques))
        except Exception:  # of the model or a backend, which may not allow the combination
            return False


def _is_free(switch: Switch, paying: list[Switch]) -> bool:
    """Return True if no paying switch has a technique of this one."""
    taken = {technique.name for other in paying for technique in other.techniques}
    return all(technique.name not in taken for technique in switch.techniques)

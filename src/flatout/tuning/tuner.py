"""Tuner that decides each technique, by a choice or by a trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from flatout.core import formatting
from flatout.core.errors import Unsuitable
from flatout.guards import MEAN_OVER_SAMPLES, Guard
from flatout.report.model import Pace, Row, Trial
from flatout.techniques import (
    REGISTRY,
    Candidate,
    LoaderCandidate,
    LoaderTechnique,
    Measured,
    NotApplicable,
    NothingBetter,
    PairCandidate,
    StepTechnique,
)
from flatout.techniques.batch_size import BatchCandidate, largest_batch
from flatout.tuning import acceptance
from flatout.tuning.arguments import BATCH_SIZE, Choices
from flatout.tuning.batch_sizes import SizeTrials, memory_limit, parts_that_fit
from flatout.tuning.bench import Bench
from flatout.tuning.costs import exposed_ms
from flatout.tuning.ledger import Decision
from flatout.tuning.ranks import applies_on_all, same_candidates
from flatout.tuning.stopwatch import LoaderComparison
from flatout.tuning.trials import (
    attempt,
    keep_parts,
    loader_trial,
    rule_trial,
    screening_seconds,
    setup_estimate,
    step_trial,
    together_with,
    warm_up_forced,
)

CandidateT = TypeVar("CandidateT", bound=Candidate)


class Tuner:
    """Tuner that decides techniques and records each decision in the ledger. Trials leave the state unchanged.

    Args:
        bench: the training.
        choices: techniques that are forbidden or forced.
    """

    def __init__(self, bench: Bench, choices: Choices) -> None:
        self._bench = bench
        self._choices = choices
        self._contradictions: dict[str, str] = {}

    def decide(self, technique: Measured) -> Row:
        """Decide one technique, and return its row. A kept candidate stays on.

        A technique that the trial of another technique has decided is not decided again. A size is searched again,
        because the best size depends on later decisions.

        Raises:
            ValueError: the technique is forced and cannot be kept, or the decision disagrees with a plan.
        """
        ledger, choice = self._bench.ledger, self._choices.of(technique)
        if ledger.is_kept(technique.name) and (choice is not None or technique is not BATCH_SIZE):
            return ledger.row(technique.name)
        cause: BaseException | None = None
        try:
            row = self._decide(technique, choice)
        except NotApplicable as reason:
            row = ledger.add(Decision(technique.row("not applicable", str(reason))))
        except Unsuitable as reason:
            row, cause = ledger.add(Decision(technique.row("rejected", str(reason)))), reason.__cause__
        if row.status != "kept":
            self._choices.refuse(technique, self._bench.job, row.why, cause)
        if row.status != "not applicable":
            self._choices.check_plan(technique, ledger.values.get(technique.name, False))
        return row

    def may_try(self, technique: Measured) -> bool:
        """Return True if a trial with enough time may decide the technique."""
        try:
            with self._bench.ranks.attempt():  # an error of one rank is no answer of all
                self._check_applies(technique)
                if self._choices.of(technique) is not None or self._why_not_worth(technique):
                    return False
                if self._why_setup_is_too_long(technique):
                    return False
                self._check_assumptions(technique)
        except (NotApplicable, Unsuitable):
            return False
        return True

    def shortest_trial(self, technique: Measured) -> float:
        """Return the estimated seconds of the shortest trial of a technique, with its setup."""
        bench, of_loaders = self._bench, isinstance(technique, LoaderTechnique)
        shortest = bench.fewest_loader_seconds if of_loaders else screening_seconds(bench)
        return setup_estimate(bench, [technique]) + shortest

    def seconds_left(self, technique: Measured) -> float:
        """Return the seconds that are left for a trial of a technique."""
        budget = self._bench.budget
        return budget.left_with_race if self._may_replace_race(technique) else budget.left

    def price(self, technique: str, candidate: Candidate) -> None:
        """Add the cost of a rule in speed to its row. The rule's candidate stays on."""
        bench = self._bench
        row, trial = bench.ledger.row(technique), attempt(bench, candidate.label, lambda: rule_trial(bench, candidate))
        bench.rewind()
        why = f"a step takes {trial.candidate_ms:.2f} ms with it and {trial.baseline_ms:.2f} ms without"
        if trial.failure:
            why = f"what it costs is not known: {trial.failure}"
        amended = replace(row, chosen=candidate.label, gain=trial.gain, trials=(trial,), why=f"{row.why}; {why}")
        bench.ledger.amend(amended)

    def _decide(self, technique: Measured, choice: Any) -> Row:
        if choice is False:
            return self._not_tried(technique, f"{self._choices.chooser} does without it")
        self._check_applies(technique)
        reason = ""
        if choice is None:
            reasons = self._why_not_worth, self._why_no_time, self._why_setup_is_too_long
            reason = next(filter(None, (why(technique) for why in reasons)), "")
        if reason:
            return self._not_tried(technique, reason)
        self._check_assumptions(technique)
        if choice is not None:
            return self._force(technique, choice)
        if technique.goal == "memory":
            return self._decide_memory(technique)
        if isinstance(technique, StepTechnique):
            return self._decide_step(technique)
        assert isinstance(technique, LoaderTechnique)
        return self._decide_loader(technique)

    def check(self, technique: Measured) -> None:
        """Raise ``NotApplicable`` if the job cannot use a technique.

        Other reasons are a contradicted assumption, and a choice that turns off the required technique.
        """
        self._check_applies(technique)
        self._check_assumptions(technique)

    def _contradiction(self, guard: Guard) -> str:
        """Return what contradicts an assumption on any rank, as a reason for a row; empty if nothing does.

        Each experiment runs once. Its result holds until the end of the tuning.
        """
        if guard.is_observed or guard.name not in self._contradictions:
            bench = self._bench
            try:
                with applies_on_all(bench.ranks):
                    seen = bench.ranks.every(guard.contradiction(bench.job))
            finally:
                bench.rewind()
            self._contradictions[guard.name] = next(filter(None, seen), "")
        found = self._contradictions[guard.name]
        return guard.reason(found) if found else ""

    def _check_applies(self, technique: Measured) -> None:
        job = self._bench.job
        if isinstance(technique, StepTechnique) and job.objective.why_untried:
            raise NotApplicable(job.objective.why_untried)
        with applies_on_all(self._bench.ranks):
            technique.check(job)
        required = self._required(technique)
        if required is not None and self._choices.of(required) is False:
            raise NotApplicable(f"it requires the {required.title}, which {self._choices.chooser} turns off")

    def _check_assumptions(self, technique: Measured) -> None:
        """Raise ``NotApplicable`` if this job contradicts an assumption of a technique."""
        for guard in technique.assumed(self._bench.job, self._choices.of(technique)):
            if reason := self._contradiction(guard):
                raise NotApplicable(reason)

    def _required(self, technique: Measured) -> StepTechnique | None:
        """Return the technique that this one requires; None if the required one is on or none is required."""
        name = technique.requires if isinstance(technique, StepTechnique) else ""
        required = next((t for t in REGISTRY if t.name == name), None)
        assert required is None or isinstance(required, StepTechnique)
        bench = self._bench
        return None if required is None or bench.ranks.all_hold(required.is_so(bench.job, True)) else required

    def _not_tried(self, technique: Measured, why: str) -> Row:
        return self._bench.ledger.add(Decision(technique.row("not tried", why)))

    def _force(self, technique: Measured, choice: Any) -> Row:
        bench = self._bench
        with applies_on_all(bench.ranks):
            candidate = technique.forced(bench.job, choice)
        why = f"{self._choices.chooser} asks for it: {technique.rationale_on(bench.job)}"
        row = technique.row("kept", why, candidate.label)
        if isinstance(technique, LoaderTechnique):
            if not bench.rewindable:
                raise NotApplicable("the loader cannot be rewound: another in its place would lose samples")
            bench.use(candidate.make())
            return bench.ledger.add(Decision(row, "choice", candidate.value))
        if technique.goal != "memory":  # whole batches may not fit yet
            warm_up_forced(bench, candidate)
        bench.rewind()
        self._check_assumptions(technique)  # the first steps may have shown more
        # The warm-up may have settled the candidate's label and value.
        return bench.keep(Decision(replace(row, chosen=candidate.label), "choice", candidate.value, candidate))

    def _why_not_worth(self, technique: Measured) -> str:
        """Return the reason against a trial of an applicable technique, even with enough time; empty without one.

        Raises:
            NotApplicable: the technique is used only if it is forced.
        """
        if technique.on_request:
            raise NotApplicable(technique.on_request)
        job, bench = self._bench.job, self._bench
        if bench.budget.seconds == 0:
            return "nothing is measured without a budget"
        if job.spec.deterministic and technique.effect_on(job) != "exact":
            return "deterministic=True: it may change the last bits, so no timing decides about it"
        if isinstance(technique, LoaderTechnique) and not bench.rewindable:
            return "the loader cannot be rewound: trying another in its place would lose samples"
        pace = bench.pace
        if isinstance(technique, StepTechnique) and technique.saves_communication:
            pace = replace(pace, exposed_ms=exposed_ms(bench))
        saving = bench.ranks.largest([technique.most_saved(job, pace)])[0]
        if saving < acceptance.least_saving(bench.known_noise) * pace.total_ms:
            return _why_nothing_to_save(technique, pace)
        return ""

    def _why_setup_is_too_long(self, technique: Measured) -> str:
        """Return the reason why a technique cannot save the time of its setup; empty if it can."""
        bench, steps = self._bench, self._bench.job.data.expected_steps
        saving = bench.ranks.largest([technique.most_saved(bench.job, bench.pace)])[0]
        estimate, could_save = setup_estimate(bench, [technique]), steps * saving / 1e3
        if could_save < estimate:
            return (
                f"setting it up takes about {estimate:.0f} s and could save {could_save:.0f} s at the very most "
                f"in the {steps:,} steps expected (expected_steps= says otherwise)"
            )
        return ""

    def _why_no_time(self, technique: Measured) -> str:
        """Return the reason why the budget does not allow a trial; empty if it does."""
        seconds, left = self._bench.budget.seconds, self.seconds_left(technique)
        shortest = self.shortest_trial(technique)
        if left == 0:
            return f"the budget of {seconds:.0f} s was spent before it came to this"
        if shortest > left:
            return f"a trial takes about {shortest:.0f} s, and {left:.0f} s of the budget of {seconds:.0f} s are left"
        return ""

    def _may_replace_race(self, technique: Measured) -> bool:
        """Return True if a trial can replace the race, because it compares whole loops, and the old one is original."""
        return isinstance(technique, LoaderTechnique) and not self._bench.ledger.won

    # Requested batch size, and batches that do not fit in memory

    def apply_batch_size(self, *, checks_memory: bool) -> None:
        """Apply the requested batch size, and split batches that do not fit in memory.

        Args:
            checks_memory: True to test with steps whether whole batches fit in memory.

        Raises:
            ValueError: the batch size cannot be applied.
            torch.OutOfMemoryError: a single sample does not fit in memory, or batches cannot be computed in parts.
        """
        bench, choices = self._bench, self._choices
        job, samples = bench.job, bench.job.spec.batch_size
        memory_techniques = [t for t in REGISTRY if isinstance(t, StepTechnique) and t.goal == "memory"]
        for technique in memory_techniques:
            if choices.of(technique):
                self.decide(technique)
        if choices.of(BATCH_SIZE):
            self.decide(BATCH_SIZE)
            return
        if job.spec.optimizer is None or choices.plan is not None or choices.of(BATCH_SIZE) is False:
            return
        if isinstance(samples, int):
            asked = BATCH_SIZE.forced(job, {"samples": samples // job.spec.accumulate})
            self._impose(BATCH_SIZE, asked, "batch_size= asks for it")
        bench.rewind()
        if not checks_memory:
            return
        failure: torch.OutOfMemoryError | None = None
        try:
            with bench.ranks.attempt():
                parts = parts_that_fit(job)
        except torch.OutOfMemoryError as error:
            failure = error
        bench.rewind()
        if failure is None and parts is not None and (reason := self._contradiction(MEAN_OVER_SAMPLES)):
            whole = formatting.size_of(int(memory_limit(job)))
            failure = torch.OutOfMemoryError(
                f"batches of {largest_batch(job)} do not fit into {whole}, and cannot be computed in parts: {reason}"
            )
        if failure is None:
            self._impose_parts(parts)
            return
        free = [technique for technique in memory_techniques if choices.of(technique) is None]
        if not any(map(self._fits_with, free)):
            raise failure

    def _impose(self, technique: StepTechnique, candidate: Candidate, why: str) -> None:
        """Keep a candidate without a trial, in the tuned loop and in the baseline."""
        row = technique.row("kept", why, candidate.label)
        self._bench.keep(Decision(row, "choice", candidate.value, candidate))

    def _impose_parts(self, parts: BatchCandidate | None) -> None:
        """Split batches that do not fit in memory."""
        if parts is not None:
            result = self._bench.job.stepper.micro_batches.result()
            why = f"whole batches do not fit into memory: they are computed in parts, {result}"
            self._impose(BATCH_SIZE, parts, why)

    def _fits_with(self, technique: StepTechnique) -> bool:
        """Keep a technique if batches, or parts of batches, fit in memory with it. Return True if it is kept."""
        bench = self._bench
        try:
            with bench.ranks.attempt():
                technique.check(bench.job)
                candidate = technique.candidates(bench.job)[0]
                with candidate:
                    parts = parts_that_fit(bench.job)
        except Exception:  # the model may not allow the change, or not even one sample may fit in memory
            return False
        finally:
            bench.rewind()
        if parts is not None and self._contradiction(MEAN_OVER_SAMPLES):
            return False
        self._impose(technique, candidate, f"batches do not fit into memory otherwise: {technique.rationale}")
        self._impose_parts(parts)
        return True

    # Techniques of the step

    def _decide_step(self, technique: StepTechnique) -> Row:
        """Try a technique, together with a required one that is off, even if that did not pay alone."""
        required = self._required(technique)
        if required is None:
            return self._conclude(technique, *self._try_all(self._candidates(technique), technique))
        pairs = [
            PairCandidate(candidate, companion, f"{candidate.label} + {required.title}")
            for candidate in self._candidates(technique)
            for companion in self._candidates(required)
        ]
        why = f"{required.rationale_on(self._bench.job)}; {together_with(technique)}"
        return self._conclude(technique, *self._try_all(pairs, technique, required), (required, why))

    def _conclude(
        self,
        technique: StepTechnique,
        trials: Sequence[Trial],
        best: tuple[Trial, Candidate] | None,
        *companions: tuple[StepTechnique, str],
        is_memory: bool = False,
    ) -> Row:
        """Decide a technique by its trials, and return its row.

        Args:
            technique: the technique.
            trials: all trials.
            best: the candidate to keep, with its trial.
            companions: techniques of the other parts of a pair, with the reasons in their rows.
            is_memory: True if an undecided technique stays rejected at the next start.
        """
        bench = self._bench
        row = acceptance.row_of(technique.row("kept", technique.rationale_on(bench.job)), trials, best and best[0])
        row = _with_finding(row, technique, best)
        if best is None:
            return bench.ledger.add(Decision(row, is_open=not is_memory and acceptance.is_open(trials)))
        return keep_parts(bench, row, best[1], *companions)

    def _candidates(self, technique: StepTechnique) -> Sequence[Candidate]:
        job, ranks = self._bench.job, self._bench.ranks
        if technique is not BATCH_SIZE:
            return same_candidates(ranks, lambda: technique.candidates(job))
        with applies_on_all(ranks):
            now, smallest, largest = BATCH_SIZE.sizes(job)
        try:
            with ranks.attempt():
                found = SizeTrials(job).find(now, smallest=smallest, largest=largest)
        except Exception as error:  # the user's code may accept only one size
            raise NothingBetter(f"other sizes fail: {formatting.first_line(error)}") from error
        reason = found.reason if ranks.size == 1 else f"on each rank, {found.reason}"
        if found.samples is None or found.samples == now:
            raise NothingBetter(reason)
        return [BATCH_SIZE.sized(job, found.samples, reason)]

    def _try_all(
        self, candidates: Sequence[CandidateT], *techniques: StepTechnique
    ) -> tuple[list[Trial], tuple[Trial, CandidateT] | None]:
        """Return the trials of candidates, and the best candidate to keep with its trial."""
        bench = self._bench
        trials: list[Trial] = []
        best: tuple[Trial, CandidateT] | None = None
        for candidate in candidates:
            if trials and not bench.budget.fits(setup_estimate(bench, techniques)):
                break
            trial = attempt(bench, candidate.label, lambda c=candidate: step_trial(bench, c, techniques))  # type: ignore[misc]
            trials.append(trial)
            if acceptance.is_kept(trial) and (best is None or acceptance.rank(trial) > acceptance.rank(best[0])):
                best = trial, candidate
        bench.rewind()
        for candidate in candidates:
            if best is None or candidate is not best[1]:
                candidate.release()
        return trials, best

    # Techniques that save memory

    def _decide_memory(self, technique: Measured) -> Row:
        """Keep a technique if it makes room for larger parts of batches, and if larger parts are faster."""
        bench, job = self._bench, self._bench.job
        assert isinstance(technique, StepTechnique)
        size = job.stepper.micro_batches.size
        if size is None:
            return self._not_tried(technique, "memory holds whole batches")
        if self._choices.of(BATCH_SIZE) is not None:
            return self._not_tried(technique, f"{self._choices.chooser} sets the parts of batches")
        pairs, failure = [], "memory holds no larger parts of batches with it"
        for candidate in self._candidates(technique):
            bench.rewind()
            try:
                with bench.ranks.attempt(), candidate:
                    parts = parts_that_fit(job) or BATCH_SIZE.whole(job)
            except Exception as error:  # the model may not allow the change
                failure = formatting.first_line(error)
                continue
            if (parts.micro_batch or math.inf) > size:
                pairs.append(PairCandidate(candidate, parts, f"{candidate.label}, {parts.label}"))
        bench.rewind()
        if not pairs:
            raise NothingBetter(failure)
        why = f"{technique.title} makes room for larger parts; its row has the gain"
        return self._conclude(
            technique, *self._try_all(pairs, technique, BATCH_SIZE), (BATCH_SIZE, why), is_memory=True
        )

    # Techniques of the loader

    def _decide_loader(self, technique: LoaderTechnique) -> Row:
        bench = self._bench
        trials: list[Trial] = []
        best: tuple[Trial, LoaderCandidate, tuple[Iterable[Any], LoaderComparison]] | None = None
        candidates = self._loaders_to_try(technique)
        is_sparing = technique.spares(bench.job)
        for candidate in candidates:
            if bench.budget.left == 0 and (trials or not self._may_replace_race(technique)):
                break
            found: list[tuple[Iterable[Any], LoaderComparison]] = []
            run = partial(loader_trial, bench, candidate, found, has_other_merits=is_sparing)
            trial = attempt(bench, candidate.label, run)
            trials.append(trial)
            earns = acceptance.earns(trial, has_other_merits=is_sparing)
            if earns and (best is None or acceptance.ratio(trial) > acceptance.ratio(best[0])):
                best = trial, candidate, found[0]
        bench.rewind()
        row = acceptance.row_of(technique.row("kept", technique.rationale_on(bench.job)), trials, best and best[0])
        row = _with_finding(row, technique, best or (None, candidates[0]))
        if best is None:
            return bench.ledger.add(Decision(row, is_open=acceptance.is_open(trials)))
        bench.use(*best[2])
        return bench.ledger.add(Decision(row, "trial", best[1].value))

    def _loaders_to_try(self, technique: LoaderTechnique) -> Sequence[LoaderCandidate]:
        """Return the technique's candidates. An error of the user's loader is a reason to reject the technique."""
        try:
            pace = self._bench.pace
            return same_candidates(self._bench.ranks, lambda: technique.candidates(self._bench.job, pace))
        except (NotApplicable, NothingBetter):
            raise
        except Exception as error:
            raise NothingBetter(formatting.first_line(error)) from error
        finally:
            self._bench.rewind()


def _why_nothing_to_save(technique: Measured, pace: Pace) -> str:
    if isinstance(technique, StepTechnique) and technique.saves_communication:
        return f"averaging gradients adds {pace.exposed_ms or 0:.2f} ms to a step of {pace.step_ms:.1f} ms"
    if isinstance(technique, StepTechnique) and pace.cpu_ms is not None:
        return f"computation takes {pace.cpu_ms:.2f} ms of the {pace.total_ms:.1f} ms of a batch: too little to save"
    return f"loading a batch takes {pace.load_ms:.2f} ms beside a step of {pace.step_ms:.1f} ms"


def _with_finding(row: Row, technique: Measured, best: Sequence[Any] | None) -> Row:
    """Return a row with the findings of the search that led to the candidate ``best[1]``."""
    finding = technique.found(best[1]) if best else ""
    return replace(row, why=f"{row.why}; {finding}") if finding else row

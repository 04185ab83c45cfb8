"""Decides the checklist, row by row: what is asked for, what a trial has to show, what cannot serve."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch

from flatout.core import formatting
from flatout.core.batches import batch_size_of, tensors_within
from flatout.core.errors import Unsuitable
from flatout.core.out_of_memory import free_memory, ran_out_of_memory
from flatout.report.model import Gain, Pace, Row, Trial
from flatout.techniques import (
    REGISTRY,
    Candidate,
    LoaderCandidate,
    LoaderTechnique,
    Measured,
    NotApplicable,
    NothingBetter,
    PairCandidate,
    SizeTechnique,
    StepTechnique,
)
from flatout.tuning.acceptance import earns, rank, ratio, serves, spares, verdict
from flatout.tuning.bench import COSTS_SHARE, Bench, off, on
from flatout.tuning.equivalence import LEEWAY, Difference, compare, nudge, observe
from flatout.tuning.loader_timer import LoaderTimer, Stretch, pace_of
from flatout.tuning.size_trials import SizeTrials
from flatout.tuning.statistics import paired_gain
from flatout.tuning.trial import FEWEST_PAIRS, KEEP_ABOVE, seconds, trial_of

SwitchT = TypeVar("SwitchT", bound=Candidate)

HOPELESS = 3.0
"""A candidate this many times slower on its first pair is not tried further."""


class Tuner:
    """Tries techniques on a bench and keeps what pays. Trials leave no trace.

    Args:
        bench: the job, its batches and its starting state.
        choices: techniques that are forbidden (False) or forced (any other value).
        chooser: who made the choices, for the report: "techniques=" or "the plan".
    """

    def __init__(self, bench: Bench, choices: Mapping[str, Any], chooser: str) -> None:
        self.decisions: dict[str, Any] = {}
        self.before: Pace | None = None
        self.after: Pace | None = None
        self._bench = bench
        self._choices = choices
        self._chooser = chooser
        self._won: dict[str, list[Candidate | None]] = {}  # techniques kept by trials; None for loaders
        self._imposed: dict[str, tuple[Any, Row]] = {}  # values and rows of what needed no trial
        self._kept: dict[str, Row] = {}  # the latest rows of what is kept
        self._settled: dict[str, Row] = {}  # rows of techniques that another's trial has decided

    # -- one row ---------------------------------------------------------------------------------------------

    def decide(self, technique: Measured) -> Row:
        """Settle one technique; the job is left with it on when the row says *kept*.

        One that was kept before, and is settled again because others have been since, may be kept in another form.
        """
        if technique.name in self._settled:
            return self._settled[technique.name]
        row = self._decide(technique)
        if row.status == "kept":
            self._kept[technique.name] = row
        return self._kept.get(technique.name, row)

    def _decide(self, technique: Measured) -> Row:
        row = technique.row("kept", technique.rationale)
        choice = self._choices.get(technique.name)
        if choice is False:
            return replace(row, status="not tried", why=f"{self._chooser} does without it")
        try:
            technique.check(self._bench.job)
            if choice is not None and technique.name in self.decisions:
                return self._kept[technique.name]
            if choice is not None:
                return self._force(technique, choice, row)
            reason = self._why_not_try(technique)
            if reason:
                return replace(row, status="not tried", why=reason)
            if isinstance(technique, StepTechnique):
                return self._decide_step(technique, row)
            assert isinstance(technique, LoaderTechnique)
            return self._decide_loader(technique, row)
        except NotApplicable as reason:
            return replace(row, status="not applicable", why=str(reason))
        except NothingBetter as reason:
            return replace(row, status="rejected", why=str(reason))

    def price(self, switch: Candidate, row: Row) -> Row:
        """The row of a rule with what its switch costs in speed; the switch stays on whatever that is."""
        bench, job = self._bench, self._bench.job
        new = bench.turns()

        def old(i: int) -> float:
            with off(switch):
                return new(i)

        def trial() -> Trial:
            bench.rewind()
            new(0), old(0)  # what is compiled for one is not for the other
            bench.rewind()
            return trial_of(switch.label, *bench.interleave(old, new), job.spec.accumulate)

        priced = self._attempt(switch.label, trial)
        bench.rewind()
        row = replace(row, chosen=switch.label, gain=priced.gain, trials=(priced,))
        if priced.failure:
            return replace(row, why=f"{row.why}; what it costs is not known: {priced.failure}")
        times = f"a step takes {priced.candidate_ms:.2f} ms with it and {priced.baseline_ms:.2f} ms without"
        return replace(row, why=f"{row.why}; {times}")

    def impose(self, technique: StepTechnique, switch: Candidate, why: str) -> Row:
        """Keep what nobody has to be convinced of; on both sides of the race."""
        self._bench.keep(switch)
        self.decisions[technique.name] = switch.value
        row = self._kept[technique.name] = technique.row("kept", why, switch.label)
        self._imposed[technique.name] = switch.value, row
        return row

    def _force(self, technique: Measured, choice: Any, row: Row) -> Row:
        candidate = technique.forced(self._bench.job, choice)
        if isinstance(technique, LoaderTechnique):
            if not self._bench.rewindable:
                raise NotApplicable("the loader cannot be rewound: another in its place would lose samples")
            self._bench.use(candidate.make())
        else:
            self._warm_up(candidate)
            self._bench.rewind()
            self._bench.keep(candidate)
        self.decisions[technique.name] = candidate.value
        why = f"{self._chooser} asks for it: {technique.rationale}"
        return replace(row, chosen=candidate.label, why=why)

    def _why_not_try(self, technique: Measured) -> str:
        """Why no trial of an applicable technique begins; empty when one may."""
        job, budget = self._bench.job, self._bench.budget
        if budget.seconds == 0:
            return "budget=0: nothing is measured"
        if job.spec.deterministic and not technique.exact:
            return "deterministic=True: it may change the last bits, so no timing decides about it"
        if isinstance(technique, LoaderTechnique) and not self._bench.rewindable:
            return "the loader cannot be rewound: trying another in its place would lose samples"
        if budget.left == 0:
            return f"the budget of {budget.seconds:.0f} s was spent before it came to this"
        pace = self._bench.pace
        saving = technique.most_saved(job, pace)
        if saving < (KEEP_ABOVE - 1) * pace.total_ms:
            return f"loading a batch takes {pace.load_ms:.2f} ms beside a step of {pace.step_ms:.1f} ms"
        estimate = technique.setup_estimate(job, pace)
        if not budget.fits(estimate):
            return (
                f"a trial takes about {estimate:.0f} s, and {budget.left:.0f} s of the budget of "
                f"{budget.seconds:.0f} s are left"
            )
        could_save = job.data.expected_steps * saving / 1e3
        if could_save < estimate:
            return (
                f"setting it up takes about {estimate:.0f} s and could save {could_save:.0f} s at the very most "
                f"in the {job.data.expected_steps:,} steps expected (expected_steps= says otherwise)"
            )
        return ""

    # -- trials of the step ----------------------------------------------------------------------------------

    def _decide_step(self, technique: StepTechnique, row: Row) -> Row:
        trials, best = self._try_all(self._candidates(technique), technique)
        if best is None and any(trial.gain is not None and not trial.failure for trial in trials):
            for companion in self._companions(technique):
                more, best = self._try_pairs(technique, companion)
                trials += more
                if best is not None:
                    return self._keep_pair(technique, companion, row, trials, *best)
        if trials and all(trial.gain is None for trial in trials):
            self._bench.job.failed.add(technique.name)
        if best is not None:
            self._keep(technique, best[1])
        row = verdict(row, trials, best and best[0])
        found = technique.found(best[1]) if best else ""
        return replace(row, why=f"{row.why}; {found}") if found else row

    def _candidates(self, technique: StepTechnique) -> Sequence[Candidate]:
        job = self._bench.job
        if not isinstance(technique, SizeTechnique):
            return technique.candidates(job)
        now, smallest, largest = technique.sizes(job)
        try:
            found = SizeTrials(job).find(now, smallest=smallest, largest=largest)
        except Exception as error:  # of the user's code, which may accept one size only
            raise NothingBetter(f"other sizes fail: {formatting.first_line(error)}") from error
        if found.samples is None or found.samples == now:
            raise NothingBetter(found.reason)
        return [technique.candidate(job, found.samples, found.reason)]

    def _try_all(
        self, candidates: Sequence[SwitchT], *held_to: StepTechnique
    ) -> tuple[list[Trial], tuple[Trial, SwitchT] | None]:
        """Trials of candidates that are held to what their techniques are, and the best that serves."""
        trials: list[Trial] = []
        best: tuple[Trial, SwitchT] | None = None
        for candidate in candidates:
            if trials and not self._bench.budget.fits(self._setup_estimate(held_to)):
                break
            trial = self._attempt(candidate.label, lambda c=candidate: self._try_step(c, held_to))
            trials.append(trial)
            if serves(trial) and (best is None or rank(trial) > rank(best[0])):
                best = trial, candidate
        self._bench.rewind()
        for candidate in candidates:
            if best is None or candidate is not best[1]:
                candidate.release()
        return trials, best

    def _keep(self, technique: StepTechnique, switch: Candidate) -> None:
        self._bench.keep(switch)
        self._note(technique, switch.value, switch)

    def _setup_estimate(self, techniques: Sequence[StepTechnique]) -> float:
        return sum(technique.setup_estimate(self._bench.job, self._bench.pace) for technique in techniques)

    # -- trials of two at once -------------------------------------------------------------------------------

    def _companions(self, technique: StepTechnique) -> Iterator[StepTechnique]:
        """Techniques that nobody has decided about, and that there is time to try together with this one."""
        for companion in REGISTRY:
            if companion.name not in technique.companions or companion.name in self._choices:
                continue
            assert isinstance(companion, StepTechnique)
            if self._bench.budget.fits(self._setup_estimate([technique, companion])):
                with contextlib.suppress(NotApplicable):
                    companion.check(self._bench.job)
                    yield companion

    def _try_pairs(
        self, technique: StepTechnique, companion: StepTechnique
    ) -> tuple[list[Trial], tuple[Trial, PairCandidate] | None]:
        job, pairs = self._bench.job, []
        for first in technique.candidates(job):
            try:
                with on(first):
                    seconds = companion.candidates(job)
            except NotApplicable:
                continue
            label = f"{first.label} + {companion.title}"
            pairs += [PairCandidate(first, second, f"{label} {second.label}") for second in seconds]
        return self._try_all(pairs, technique, companion)

    def _keep_pair(
        self,
        technique: StepTechnique,
        companion: StepTechnique,
        row: Row,
        trials: list[Trial],
        best: Trial,
        pair: PairCandidate,
    ) -> Row:
        """The technique's row has the gain of both; the companion's says where that is told."""
        for each, switch in zip((technique, companion), pair.parts, strict=True):
            self._keep(each, switch)
        told = f"{companion.rationale}; tried together with {technique.title}, whose row has the gain of both"
        self._settled[companion.name] = replace(companion.row("kept", told), chosen=pair.parts[1].label)
        alone = f"it pays in the company of {companion.title} alone"
        return verdict(replace(row, why=f"{row.why}; {alone}"), trials, best)

    # -- one trial of the step -------------------------------------------------------------------------------

    def _try_step(self, candidate: Candidate, held_to: Sequence[StepTechnique]) -> Trial:
        """A trial against what is kept so far.

        Args:
            candidate: a switch of a technique, or of a pair of them.
            held_to: the techniques; what one of them is held to, both are.
        """
        job, bench = self._bench.job, self._bench
        took = self._warm_up(candidate)
        setup = max(0.0, took - len(self._shapes()) * bench.pace.step_ms / 1e3)
        hopeless = self._is_hopeless(candidate)
        if hopeless is not None:
            return replace(hopeless, setup_seconds=setup)
        differences = self._verify(candidate, held_to)
        by = {d.what: d.by for d in differences}

        turn = bench.turns()

        def old(i: int) -> float:
            return turn(i) * candidate.scale

        def new(i: int) -> float:
            with on(candidate):
                return turn(i)

        bench.rewind()
        for i in range(candidate.settling * len(job.data.batches)):
            new(i)
        times = bench.interleave(old, new)
        trial = replace(
            trial_of(candidate.label, *times, job.spec.accumulate),
            setup_seconds=setup,
            loss_difference=by.get("losses"),
            output_difference=by.get("outputs"),
            gradient_difference=by.get("gradients"),
            failure="; ".join(str(d) for d in differences if d.fails) or candidate.why_off,
        )
        if candidate.scale != 1.0:  # more memory is no waste then, and a longer first step no setup
            return trial
        trial = replace(trial, baseline_bytes=bench.memory, candidate_bytes=bench.memory_with(candidate))
        saved = (trial.baseline_ms - trial.candidate_ms) / 1e3
        if self._setup_estimate(held_to) and saved > 0:
            trial = replace(trial, break_even_steps=setup / saved)
        return trial

    def _warm_up(self, candidate: Candidate) -> float:
        """Run a batch of every shape with the candidate; the seconds that took."""
        job = self._bench.job
        self._bench.rewind()
        with on(candidate):
            took = seconds(lambda: [job.stepper.step(batch) for batch in self._shapes()], job.spec.device)
            candidate.freeze()
        return took

    def _shapes(self) -> list[Any]:
        """A batch of every shape."""
        return list(
            {tuple(t.shape for t in tensors_within(batch)): batch for batch in self._bench.job.data.batches}.values()
        )

    def _is_hopeless(self, candidate: Candidate) -> Trial | None:
        """A verdict from a single pair where that is plain: emulated 16-bit arithmetic can be ten times slower."""
        job = self._bench.job
        batch = job.data.batches[0]
        self._bench.rewind()
        old = seconds(lambda: job.stepper.step(batch), job.spec.device) * candidate.scale
        with on(candidate):
            batch = job.data.batches[0]
            for _ in range(candidate.settling):
                job.stepper.step(batch)
            new = seconds(lambda: job.stepper.step(batch), job.spec.device)
        return trial_of(candidate.label, [old], [new], 1) if new > HOPELESS * old else None

    def _verify(self, candidate: Candidate, held_to: Sequence[StepTechnique]) -> list[Difference]:
        """How far the candidate's outputs, gradients and losses are from the baseline's."""
        if not any(t.is_verified for t in held_to) or candidate.scale != 1.0:  # other samples have other outputs
            return []
        job, evaluation = self._bench.job, any(t.checks_evaluation for t in held_to)
        batches = job.data.batches
        self._bench.rewind()
        baseline = observe(job, batches, evaluation=evaluation)
        self._bench.rewind()
        with on(candidate):
            observed = observe(job, batches, evaluation=evaluation)
            found = compare(baseline, observed)
        if any(d.fails for d in found if d.what != "losses"):
            self._bench.rewind()
            nudge(job.spec.model, observed.dtype)
            nudged = compare(baseline, observe(job, batches, evaluation=evaluation))
            found = [d if d.what == "losses" else _allow(d, LEEWAY * n.by) for d, n in zip(found, nudged, strict=True)]
        if any(t.draws_other_numbers for t in held_to) and any(d.fails for d in found):
            self._bench.rewind()
            torch.manual_seed(torch.initial_seed() + 1)
            redrawn = compare(baseline, observe(job, batches, evaluation=evaluation))
            found = [_allow(d, 2 * r.by) for d, r in zip(found, redrawn, strict=True)]
        return found

    # -- trials of the loader --------------------------------------------------------------------------------

    def _decide_loader(self, technique: LoaderTechnique, row: Row) -> Row:
        trials: list[Trial] = []
        best: tuple[Trial, LoaderCandidate, Iterable[Any]] | None = None
        candidates = self._loaders_to_try(technique)
        suffices = spares if technique.spares(self._bench.job) else earns
        for candidate in candidates:
            if self._bench.budget.left == 0:
                break
            made: list[Iterable[Any]] = []
            trial = self._attempt(candidate.label, lambda c=candidate, m=made: self._try_loader(c, m))
            trials.append(trial)
            if suffices(trial) and (best is None or ratio(trial) > ratio(best[0])):
                best = trial, candidate, made[0]
        self._bench.rewind()
        if best is not None:
            self._bench.use(best[2])
            self._note(technique, best[1].value, None)
        row = verdict(row, trials, best and best[0])
        found = technique.found(best[1] if best else candidates[0])
        return replace(row, why=f"{row.why}; {found}") if found else row

    def _loaders_to_try(self, technique: LoaderTechnique) -> Sequence[LoaderCandidate]:
        """Whatever looking for them raises is a reason to do without."""
        try:
            return technique.candidates(self._bench.job, self._bench.pace)
        except (NotApplicable, NothingBetter):
            raise
        except Exception as error:
            raise NothingBetter(formatting.first_line(error)) from error
        finally:
            self._bench.rewind()

    def _try_loader(self, candidate: LoaderCandidate, made: list[Iterable[Any]]) -> Trial:
        job = self._bench.job
        self._bench.rewind()
        start = time.perf_counter()
        made.append(candidate.make())
        setup = time.perf_counter() - start
        times = self._bench.alternate(LoaderTimer(job, job.data.source), LoaderTimer(job, made[0]))
        return replace(trial_of(candidate.label, *times, self._bench.stretch_steps()), setup_seconds=setup)

    # -- what trials have in common --------------------------------------------------------------------------

    def _attempt(self, label: str, trial: Any) -> Trial:
        """Run a trial; whatever a candidate raises is a reason to do without it."""
        try:
            return trial()
        except NotApplicable:
            raise
        except Unsuitable as reason:
            failure = str(reason)
        except Exception as error:
            failure = formatting.first_line(error)
            if ran_out_of_memory(error):
                failure = f"it ran out of memory: {failure}"
        # Only here is the error gone, and with it the frames that hold the trial's tensors.
        self._bench.rewind()
        free_memory(self._bench.job.spec.device)
        return Trial(label, self._bench.pace.step_ms, math.nan, None, 0, failure=failure)

    @property
    def won(self) -> tuple[str, ...]:
        """Names of the techniques that trials kept, in that order."""
        return tuple(self._won)

    def _note(self, technique: Measured, value: Any, switch: Candidate | None) -> None:
        self.decisions[technique.name] = value
        self._won.setdefault(technique.name, []).append(switch)

    # -- the whole -------------------------------------------------------------------------------------------

    def race(self, rows: dict[str, Row]) -> None:
        """The loop as it came against the loop as tuned; what trials had kept is taken back whole if it is slower.

        Each technique was measured in the company of those kept before it; only this shows that together they pay.
        What was asked for by name stays on both sides.

        Args:
            rows: rewritten for what is taken back.
        """
        bench, budget = self._bench, self._bench.budget
        if budget.seconds == 0:
            return
        self.after = bench.pace
        if not self._won:
            self.before = self.after
            return
        has_time = budget.left > 0
        budget.allow(COSTS_SHARE)
        if not has_time and not budget.fits(2 * FEWEST_PAIRS * bench.stretch_steps() * bench.pace.total_ms / 1e3):
            return
        bench.rewind()
        won = list(chain.from_iterable(self._won.values()))
        switches = sorted((switch for switch in won if switch is not None), key=bench.kept.index)
        loader_won = None in won
        times = self._race_loops(switches, loader_won) if bench.rewindable else self._race_steps(switches)
        gain = paired_gain(*times)
        if gain.high < 0.8 or (gain.high < 1.0 and len(times[0]) >= FEWEST_PAIRS):
            self._take_back(rows, switches, loader_won, gain)
        bench.rewind()

    def _race_loops(self, switches: Sequence[Candidate], loader_won: bool) -> tuple[list[float], list[float]]:
        job = self._bench.job
        new = LoaderTimer(job, job.data.source)
        with off(*switches):
            old = LoaderTimer(job, job.data.loader if loader_won else job.data.source)
        scale = math.prod(switch.scale for switch in switches)
        times = self._bench.alternate(old, new, to_new=switches, scale=scale)
        self.before, self.after = old.pace.scaled(scale), new.pace
        return times

    def _race_steps(self, switches: Sequence[Candidate]) -> tuple[list[float], list[float]]:
        """The same on the trial's batches alone, where the loader must not be read for it."""
        bench, job = self._bench, self._bench.job
        new = bench.turns()

        def old(i: int) -> float:
            with off(*switches):
                return new(i)

        times = bench.interleave(old, new)
        samples = job.spec.accumulate * batch_size_of(job.data.batches[0])
        self.before, self.after = (
            pace_of(Stretch(took, 0.0, samples, job.spec.accumulate) for took in each) for each in times
        )
        return times

    def _take_back(self, rows: dict[str, Row], switches: Sequence[Candidate], loader_won: bool, gain: Gain) -> None:
        for switch in reversed(switches):
            self._bench.take_back(switch)
        if loader_won:
            self._bench.use(self._bench.job.data.loader)
        for name in self._won:
            del self.decisions[name]
            if name in self._imposed:
                self.decisions[name], rows[name] = self._imposed[name]
                continue
            why = f"paid alone, but everything kept together ran at {gain.ratio:.2f} times the original speed"
            rows[name] = replace(rows[name], status="rejected", chosen="", why=why)
        self._won.clear()
        self.after = self.before


def _allow(difference: Difference, much: float) -> Difference:
    return replace(difference, allowed=max(difference.allowed, much))

"""Decides the checklist, row by row: what a rule settles, what a trial has to show, what cannot serve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.data import InMemoryLoader, batch_size_of, clone_loader, tensors_of
from flatout.job import Job
from flatout.measure.budget import Budget
from flatout.measure.equivalence import loss_difference, loss_trajectory
from flatout.measure.state import State
from flatout.measure.statistics import paired_gain
from flatout.measure.trial import KEEP_ABOVE, Track, interleave, pays, seconds
from flatout.report.model import Pace, Row, Trial
from flatout.techniques import LoaderTechnique, Measured, NotApplicable, Source, StepTechnique, Switch

TRIAL_SECONDS = 4.0
"""Longest that the pairs of one trial take; setting up comes on top."""

HOPELESS = 3.0
"""A candidate this many times slower on its first pair is not tried further."""

STRETCH_SECONDS = 0.05
"""Length of the stretches of training that loaders take turns in."""


class Tuner:
    """Tries techniques on one job and keeps what pays. Trials leave no trace.

    Args:
        job: what is trained; its ``source`` changes when a loader is kept.
        batches: a few real batches, on the device.
        kept: receives every switch that is left on, in order.
        rewindable: whether the loader may be iterated in a trial without losing samples.
        budget: seconds for all trials.
        choices: techniques that are forbidden (False) or forced (any other value).
        chooser: who made the choices, for the report: "techniques=" or "the plan".
        state: what training is put back to after each trial.
    """

    def __init__(
        self,
        job: Job,
        batches: Sequence[Any],
        *,
        kept: list[Switch],
        rewindable: bool,
        budget: Budget,
        choices: dict[str, Any],
        chooser: str,
        state: State,
    ) -> None:
        self.kept = kept
        self.decisions: dict[str, Any] = {}
        self.before: Pace | None = None
        self.after: Pace | None = None
        self.notes: list[str] = []
        self._pace: Pace | None = None
        self._job = job
        self._batches = batches
        self._rewindable = rewindable
        self._budget = budget
        self._choices = choices
        self._chooser = chooser
        self._state = state

    # -- one row ---------------------------------------------------------------------------------------------

    def decide(self, technique: Measured) -> Row:
        """Settle one technique; the job is left with it on when the row says *kept*."""
        row = Row(technique.name, technique.number, technique.title, "kept", technique.kept_because)
        choice = self._choices.get(technique.name)
        if choice is False:
            return replace(row, status="not tried", why=f"{self._chooser} does without it")
        try:
            technique.check(self._job)
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

    def _why_not_try(self, technique: Measured) -> str:
        """Why no trial of an applicable technique begins; empty when one may."""
        job = self._job
        if self._budget.seconds == 0:
            return "budget=0: nothing is measured"
        if job.deterministic and not technique.exact:
            return "deterministic=True: it may change the last bits, so no timing decides about it"
        if isinstance(technique, LoaderTechnique) and not self._rewindable:
            return "the loader cannot be rewound, so trying another in its place would lose samples"
        pace = self.pace
        if isinstance(technique, LoaderTechnique):
            saving = pace.load_ms
            if saving < (KEEP_ABOVE - 1) * (pace.load_ms + pace.step_ms):
                return f"loading a batch takes {pace.load_ms:.2f} ms beside a step of {pace.step_ms:.1f} ms"
        else:
            assert isinstance(technique, StepTechnique)
            saving = pace.step_ms * (1 - 1 / technique.optimistic_gain)
        estimate = technique.setup_estimate(job, pace)
        if self._budget.left == 0:
            return f"the budget of {self._budget.seconds:.0f} s was spent before it came to this"
        if not self._budget.fits(estimate):
            return (
                f"a trial takes about {estimate:.0f} s, and {self._budget.left:.0f} s of the budget of "
                f"{self._budget.seconds:.0f} s are left"
            )
        could_save = job.expected_steps * saving / 1e3
        if could_save < estimate:
            return (
                f"setting it up takes about {estimate:.0f} s and could save {could_save:.0f} s at the very most "
                f"in the {job.expected_steps:,} steps expected (expected_steps= says otherwise)"
            )
        return ""

    def _force(self, technique: Measured, choice: Any, row: Row) -> Row:
        candidate = technique.forced(self._job, choice)
        if isinstance(technique, LoaderTechnique):
            self._job.source = candidate.make()
        else:
            self._warm_up(candidate)
            self._rewind()
            self._keep(candidate)
        self.decisions[technique.name] = candidate.value
        why = f"{self._chooser} asks for it: {technique.kept_because}"
        return replace(row, chosen=candidate.label, why=why)

    # -- trials of the step ----------------------------------------------------------------------------------

    def _decide_step(self, technique: StepTechnique, row: Row) -> Row:
        trials: list[Trial] = []
        best: tuple[Trial, Switch] | None = None
        for candidate in technique.candidates(self._job):
            trial = self._try_step(technique, candidate)
            trials.append(trial)
            if _earns(trial) and (best is None or trial.gain.ratio > best[0].gain.ratio):  # type: ignore[union-attr]
                best = trial, candidate
        self._rewind()
        if best is not None:
            self._keep(best[1])
            self.decisions[technique.name] = best[1].value
        return _verdict(row, trials, best and best[0])

    def _try_step(self, technique: StepTechnique, candidate: Switch) -> Trial:
        job, batches = self._job, self._batches
        difference: float | None = None
        baseline_losses: list[float] = []
        try:
            setup = self._warm_up(candidate)
            hopeless = self._is_hopeless(candidate)
            if hopeless is not None:
                return replace(hopeless, setup_seconds=setup)
            if technique.tolerance is not None:
                self._rewind()
                baseline_losses = loss_trajectory(job, batches)
                self._rewind()
                with _on(candidate):
                    difference = loss_difference(baseline_losses, loss_trajectory(job, batches))
                    if technique.checks_evaluation:
                        job.model.eval()
                        with torch.no_grad():
                            job.loss(batches[0])
        except Exception as error:  # whatever a candidate raises is a reason to do without it
            job.discard()
            return Trial(candidate.label, self.pace.step_ms, math.nan, None, 0, failure=_first_line(error))

        def unit(i: int) -> None:
            for k in range(job.accumulate):
                job.step(batches[(i * job.accumulate + k) % len(batches)])

        def old(i: int) -> float:
            return seconds(lambda: unit(i), job.device)

        def new(i: int) -> float:
            with _on(candidate):
                return seconds(lambda: unit(i), job.device)

        self._rewind()
        trial = _trial(candidate.label, *interleave(old, new, self._budget.deadline(TRIAL_SECONDS)), job.accumulate)
        trial = replace(trial, setup_seconds=setup, loss_difference=difference)
        saved = (trial.baseline_ms - trial.candidate_ms) / 1e3
        if technique.setup_estimate(job, self.pace) and saved > 0:
            trial = replace(trial, break_even_steps=setup / saved)
        if difference is not None and technique.tolerance is not None and difference > technique.tolerance:
            limit = max(technique.tolerance, 2 * self._loss_noise(baseline_losses))
            if difference > limit:
                trial = replace(trial, failure=f"losses differ by {difference:.1%}, more than {limit:.1%}")
        return trial

    def _warm_up(self, candidate: Switch) -> float:
        """Run every batch shape once with the candidate; the seconds that took beyond ordinary steps."""
        self._rewind()
        shapes = {tuple(t.shape for t in tensors_of(batch)): batch for batch in self._batches}
        with _on(candidate):
            took = seconds(lambda: [self._job.step(batch) for batch in shapes.values()], self._job.device)
            candidate.freeze()
        return max(0.0, took - len(shapes) * self.pace.step_ms / 1e3)

    def _is_hopeless(self, candidate: Switch) -> Trial | None:
        """A verdict from a single pair where that is plain: emulated 16-bit arithmetic can be ten times slower."""
        batch, device = self._batches[0], self._job.device
        self._rewind()
        old = seconds(lambda: self._job.step(batch), device)
        with _on(candidate):
            new = seconds(lambda: self._job.step(batch), device)
        return _trial(candidate.label, [old], [new], 1) if new > HOPELESS * old else None

    def _loss_noise(self, losses: Sequence[float]) -> float:
        """How far the baseline's own losses move when dropout and its like draw other numbers."""
        self._rewind()
        torch.manual_seed(torch.initial_seed() + 1)
        return loss_difference(losses, loss_trajectory(self._job, self._batches))

    # -- trials of the loader --------------------------------------------------------------------------------

    def _decide_loader(self, technique: LoaderTechnique, row: Row) -> Row:
        trials: list[Trial] = []
        best: tuple[Trial, Source, Iterable[Any]] | None = None
        for candidate in technique.candidates(self._job):
            if not self._budget.fits(0.0):
                break
            trial, loader = self._try_loader(candidate)
            trials.append(trial)
            if _earns(trial) and (best is None or trial.gain.ratio > best[0].gain.ratio):  # type: ignore[union-attr]
                best = trial, candidate, loader
        self._rewind()
        if best is not None:
            self._job.source = best[2]
            self._pace = None
            self.decisions[technique.name] = best[1].value
        return _verdict(row, trials, best and best[0])

    def _try_loader(self, candidate: Source) -> tuple[Trial, Iterable[Any]]:
        self._rewind()
        start = time.perf_counter()
        loader = candidate.make()
        setup = time.perf_counter() - start
        old, new = self._track(self._job.source), self._track(loader)
        times = self._alternate(old, new, lambda: None, lambda: None)
        return replace(_trial(candidate.label, *times, self._stretch_steps()), setup_seconds=setup), loader

    def _track(self, loader: Iterable[Any]) -> Track:
        """A loader to step in turns; a DataLoader is cloned, so that the user's own starts no workers."""
        if isinstance(loader, DataLoader):
            settle = loader.num_workers * (loader.prefetch_factor or 0)
            return Track(self._job, clone_loader(loader), settle)
        return Track(self._job, loader, settle=2 if isinstance(loader, InMemoryLoader) else 0)

    def _stretch_steps(self) -> int:
        pace = self.pace
        return min(50, max(4, math.ceil(STRETCH_SECONDS / ((pace.step_ms + pace.load_ms) / 1e3))))

    def _alternate(
        self, old: Track, new: Track, to_old: Callable[[], None], to_new: Callable[[], None]
    ) -> tuple[list[float], list[float]]:
        steps = self._stretch_steps()

        def timed(track: Track, prepare: Callable[[], None]) -> Callable[[int], float]:
            def stretch(_: int) -> float:
                prepare()
                return track.stretch(steps)

            return stretch

        try:
            return interleave(timed(old, to_old), timed(new, to_new), self._budget.deadline(TRIAL_SECONDS))
        finally:
            old.close()
            new.close()

    # -- the whole -------------------------------------------------------------------------------------------

    @property
    def pace(self) -> Pace:
        """How fast the job runs with what is kept so far."""
        if self._pace is None:
            self._pace = self._measure_pace()
        return self._pace

    def _measure_pace(self) -> Pace:
        job, batches = self._job, self._batches
        self._rewind()
        for batch in batches[:2]:
            job.step(batch)
        if self._rewindable:
            track = self._track(job.source)
            track.stretch(8)
            track.close()
            pace = track.pace
        else:
            step = median(seconds(lambda b=b: job.step(b), job.device) for b in (*batches, *batches))  # type: ignore[misc]
            pace = Pace(step_ms=1e3 * step, load_ms=0.0, samples_per_second=batch_size_of(batches[0]) / step)
        self._rewind()
        return pace

    def check_against_original(self) -> None:
        """Race the loop as it came against the loop as tuned; what turns out slower is taken back whole.

        Each technique was measured in the company of those kept before it; only this shows that together they pay.
        """
        job, source, switches = self._job, self._job.source, list(self.kept)
        if not self._rewindable or not (switches or source is not job.loader):
            self.after = self.pace
            return
        self._rewind()

        def to_old() -> None:
            while self.kept:
                self.kept.pop().disable()

        def to_new() -> None:
            if not self.kept:
                for switch in switches:
                    self._keep(switch)

        old, new = self._track(job.loader), self._track(source)
        gain = paired_gain(*self._alternate(old, new, to_old, to_new))
        self.before, self.after = old.pace, new.pace
        if gain.high < 1.0:
            to_old()
            job.source, self.after = job.loader, old.pace
            self.decisions.clear()
            self.notes.append(f"taken back: together, the techniques ran at {gain.ratio:.2f} times the original speed")
        else:
            to_new()
        self._rewind()

    def _keep(self, switch: Switch) -> None:
        switch.enable()
        self.kept.append(switch)
        self._pace = None

    def _rewind(self) -> None:
        """Put the training state back, with exactly the kept switches on."""
        for switch in reversed(self.kept):
            switch.disable()
        self._job.discard()
        self._state.restore()
        for switch in self.kept:
            switch.enable()


@contextmanager
def _on(switch: Switch) -> Iterator[None]:
    switch.enable()
    try:
        yield
    finally:
        switch.disable()


def _trial(label: str, old: list[float], new: list[float], steps: int) -> Trial:
    return Trial(
        candidate=label,
        baseline_ms=1e3 * median(old) / steps,
        candidate_ms=1e3 * median(new) / steps,
        gain=paired_gain(old, new),
        pairs=len(old),
    )


def _earns(trial: Trial) -> bool:
    return not trial.failure and trial.gain is not None and pays(trial.gain, trial.pairs)


def _verdict(row: Row, trials: list[Trial], best: Trial | None) -> Row:
    """The row for what the trials showed."""
    if best is not None:
        return replace(row, chosen=best.candidate, gain=best.gain, trials=tuple(trials))
    timed = [t for t in trials if t.gain is not None]
    if not timed:
        why = trials[0].failure if trials else "the budget was spent before a trial could begin"
        return replace(row, status="rejected" if trials else "not tried", why=why, trials=tuple(trials))
    closest = max(timed, key=lambda t: t.gain.ratio if t.gain else 0.0)
    why = closest.failure or f"a step takes {closest.candidate_ms:.2f} ms with it and {closest.baseline_ms:.2f} without"
    return replace(row, status="rejected", why=why, gain=closest.gain, trials=tuple(trials))


def _first_line(error: Exception) -> str:
    """The error in one line; a line that only announces another is joined with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    shown = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {shown}"

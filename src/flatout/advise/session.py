"""Course of ``flatout advise``: some steps of a script are profiled, and techniques are tried between later steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from flatout.advise.batch_trial import seconds_of_sizes
from flatout.advise.observe import Observer
from flatout.autotune.engine import Engine
from flatout.autotune.module_tuning import Options
from flatout.autotune.script_report import ScriptReport
from flatout.core.formatting import first_line
from flatout.core.main_program import MainProgram
from flatout.core.standard_error import say
from flatout.data import Stage, sample_stages
from flatout.profile.record import Course, ProfileRecording
from flatout.profile.script import Ended, run_course
from flatout.profile.shown_profile import Profile
from flatout.tuning.budget import Allowance

STEPS, WARMUP = 5, 3
"""Number of steps to time and then to profile, and number of warm-up steps before."""


@dataclass(frozen=True)
class Observations:
    """Observations of a script.

    Attributes:
        observer: calls and loaders.
        profile: times of the script's steps; None if no step was timed.
        sizes: seconds of a training call, and of the call with more samples; None without a trial.
        report: gains of techniques.
        stages: stages of loading; empty if samples cannot be examined, or if the script ended first.
    """

    observer: Observer
    profile: Profile | None
    sizes: tuple[float, float] | None
    report: ScriptReport
    stages: tuple[Stage, ...] = ()


class _Time(Allowance):
    """Time for trials. No time is available before the profile is complete, and then all the remaining time."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline
        self.is_open = False

    @property
    def left(self) -> float:
        return self._deadline - time.perf_counter() if self.is_open else -math.inf

    def due(self, seconds: float) -> float:
        return math.inf if seconds == math.inf else 0.0


class AdviceSession:
    """Run of a script for advice.

    Args:
        options: techniques that may be tried.
        seconds: time from the first update to the end of the run.
    """

    def __init__(self, options: Options, seconds: float) -> None:
        self._options = replace(options, budget=None, tunes_ranks=False)  # --seconds is the limit
        self._seconds = seconds
        self._recording = ProfileRecording(STEPS, WARMUP)
        self._sizes: tuple[float, float] | None = None
        self._stages: tuple[Stage, ...] = ()

    def run(self, program: MainProgram) -> tuple[Observations, Ended]:
        """Run a program, and end the program by ``SystemExit(0)`` after an update.

        The end comes when an epoch has passed and all techniques are tried, or when the time is up. The program's
        ``finally`` blocks and ``atexit`` functions run as usual.

        Returns:
            The observations, and the end of the program.
        """
        self._observer, self._engine = Observer(), Engine(self._options, say)
        try:
            ended = run_course(program, self._course(), stop=True)
        finally:
            self._engine.close()
            self._observer.close()
        profile = self._recording.profile() if self._recording.timed else None
        report = ScriptReport.of(self._engine)
        self._engine.undo()
        return Observations(self._observer, profile, self._sizes, report, self._stages), ended

    def _course(self) -> Course:
        yield False
        self._observer.end_update()
        deadline = time.perf_counter() + self._seconds
        allowance = _Time(deadline)
        if self._engine.allowance is not None:
            self._engine.allowance = allowance
        yield from self._profile(deadline)
        yield from self._try_sizes()
        allowance.is_open = True
        while time.perf_counter() < deadline and not (self._has_seen_an_epoch and self._has_tried(allowance)):
            yield False
            self._observer.end_update()
        self._examine_samples()  # last, because a dataset for worker processes may open files at its first sample

    def _profile(self, deadline: float) -> Course:
        """Profile steps until the deadline. At least one step is timed, because most rules for causes require times."""
        steps = self._recording.course()
        try:
            while not next(steps, True) and (time.perf_counter() < deadline or not self._recording.timed):
                yield False
                self._observer.end_update()
        finally:
            steps.close()

    def _try_sizes(self) -> Course:
        """Record a training call, and time the call with more samples."""
        self._observer.wants_sample = True
        yield False
        self._observer.wants_sample = False
        self._observer.end_update()
        sample, self._observer.sample = self._observer.sample, None
        module = None if sample is None else sample[0]()
        if sample is None or module is None:
            return
        try:
            self._sizes = seconds_of_sizes(module, sample[1])
        except Exception as error:  # the module may accept one size only, or run out of memory
            say(f"larger batches could not be tried: {first_line(error)}")

    def _examine_samples(self) -> None:
        """Find the stages of loading."""
        loader = self._observer.training_loader
        device = next((site.device for site in self._observer.calls if site.is_reached), None)
        try:
            self._stages = () if loader is None else sample_stages(loader, seconds=3.0, device=device)
        except Exception as error:  # of user code, such as a dataset that only worker processes can read
            say(f"the stages of loading are unknown: {first_line(error)}")

    @property
    def _has_seen_an_epoch(self) -> bool:
        """True if the training loader has started a second epoch, so that an evaluation between epochs was seen."""
        loader = self._observer.training
        return loader is not None and loader.epochs > 1

    def _has_tried(self, allowance: _Time) -> bool:
        return self._engine.updates > 2 and all(tuning.needs > allowance.left for tuning in self._engine.tunings)

"""Search, which repeats close trials with the time that other techniques did not need."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

import flatout
from flatout.report.model import Pace
from flatout.techniques import Candidate
from flatout.training.job import Job
from flatout.tuning import pairs
from tests.clock import Clock, TimedStep
from tests.jobs import make_job
from tests.tuning.harness import Change, OneCandidate

SECONDS, NOISE = 0.05, 0.3


class Close(OneCandidate):
    """Technique with a gain of 15 % under noise of 30 %."""

    is_on = False

    def change(self, job: Job) -> Candidate:
        def toggle(on: bool) -> None:
            self.is_on = on

        return Change("close", lambda: toggle(True), lambda: toggle(False))


class Expensive(Close):
    """Technique whose estimate is 118 s, although it takes one step."""

    name, title = "expensive", "an expensive candidate"

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        return 118.0


@pytest.mark.parametrize("beside", [[], [Expensive()]])
def test_a_close_call_gets_the_time_that_is_left(
    beside: list[Expensive], the_only_techniques: Callable[..., None], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_seeds", itertools.count(50))  # these orders of pairs leave the trial undecided
    close = Close()
    the_only_techniques(close, *beside)
    model, loader, optimizer = make_job()
    noise = random.Random(0)

    def seconds(*_: object) -> float:
        slow = any(technique.is_on for technique in beside)
        return SECONDS * noise.uniform(1 - NOISE, 1 + NOISE) * (10 if slow else 1 / 1.15 if close.is_on else 1)

    trials = 0
    decide = flatout.tuning.tuner.Tuner.decide

    def counted(*args):  # type: ignore[no-untyped-def]
        nonlocal trials
        trials += 1
        return decide(*args)

    monkeypatch.setattr(flatout.tuning.tuner.Tuner, "decide", counted)
    run = flatout.optimize(
        model, loader, optimizer, TimedStep(clock, seconds), budget=150.0, expected_steps=10**6, plan=None
    )
    assert run.report.row("candidate").status == "kept"
    assert trials == 1 + 2 * len(beside)

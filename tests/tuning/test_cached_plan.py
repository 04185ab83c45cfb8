"""Cached plans: a second start repeats the decisions of the first, after a comparison of numerics and a race."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import flatout
from flatout.plan import Plan
from flatout.report.model import untried
from flatout.techniques import Candidate, NotApplicable
from flatout.techniques.cpu_threads import CpuThreads
from flatout.training.job import Job
from flatout.tuning import acceptance, agenda, session
from flatout.tuning.bench import Bench
from tests.clock import Clock, TimedStep
from tests.helpers import snapshot
from tests.jobs import Net, Stream, make_data, make_job, only
from tests.reasons import reasons
from tests.tuning.harness import Change, OneCandidate
from tests.unseen import Unseen

SECONDS = 0.02
PAYS = {"fused_optimizer": 0.5, "cpu_threads": 0.7}


class Starts:
    """Repeated starts of one training, whose steps take simulated time.

    Args:
        clock: the clock.

    Attributes:
        factors: factor of the step time by name of an active technique.
        overhead: seconds of a step without samples.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.overhead = 0.0
        self.factors: dict[str, float] = dict(PAYS)

    def start(self, **arguments: Any) -> flatout.Run:
        """Return a new run, as in a new process."""
        model, loader, optimizer = make_job()
        step = TimedStep(self._clock, self._seconds).watch(model, optimizer)
        given = {"loader": loader, "techniques": only(*PAYS), "budget": 100, "expected_steps": 1000} | arguments
        run = flatout.optimize(model, optimizer=optimizer, loss_fn=step, **given)
        run.undo()
        return run

    def _seconds(self, samples: int, active: Collection[str]) -> float:
        seconds = self.overhead + SECONDS * samples / 16
        for name in active:
            seconds *= self.factors.get(name, 1.0)
        return seconds


@pytest.fixture
def starts(clock: Clock, plans: Path) -> Iterator[Starts]:
    threads = torch.get_num_threads()
    yield Starts(clock)
    torch.set_num_threads(threads)


def tried(run: flatout.Run) -> set[str]:
    return {row.technique for row in run.report.rows if row.trials}


def notes(run: flatout.Run) -> set[str]:
    return set().union(*map(reasons, run.report.summary.notes))


def the_file(plans: Path) -> Path:
    (path,) = plans.glob("*.json")
    return path


def edit(plans: Path, **changes: Any) -> None:
    """Change fields of the only cached plan."""
    path = the_file(plans)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_second_start_repeats_the_decisions_without_trials(starts: Starts) -> None:
    first, second = starts.start(), starts.start()
    assert first.plan.decisions.keys() == {"fused_optimizer", "cpu_threads"}
    assert (tried(first), tried(second)) == (set(PAYS), set())
    assert second.plan == first.plan
    assert "from-cache" in notes(second) - notes(first)
    assert all("from-cache" in reasons(second.report.row(name)) for name in PAYS)
    summary = second.report.summary
    assert summary.before is not None
    assert summary.after is not None
    assert summary.before.step_ms / summary.after.step_ms == pytest.approx(1 / 0.35, rel=0.06)
    assert summary.tuning_seconds < 5


def test_the_plan_holds_how_it_was_made(starts: Starts, plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_average", lambda: 0.25)
    first = starts.start()
    kept = Plan.load(the_file(plans))
    assert kept == first.plan
    assert (kept.load_average, kept.undecided) == (0.25, [])
    assert kept.noise == pytest.approx(0.0, abs=1e-3)
    assert kept.cores is not None
    monkeypatch.setattr(session, "load_average", lambda: 0.5)
    assert starts.start().plan.load_average == 0.25  # not from the race


def test_a_plan_without_measurements_does_not_hold_the_load(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_average", lambda: 0.25)
    assert starts.start(budget=0).plan.load_average is None


def test_without_a_gain_an_empty_plan_is_kept(starts: Starts) -> None:
    starts.factors = dict.fromkeys(PAYS, 1.5)
    assert tried(starts.start()) == set(PAYS)
    second = starts.start()
    assert (second.plan.decisions, tried(second)) == ({}, set())
    assert "from-cache" in reasons(second.report.row("cpu_threads"))


def test_a_second_start_says_why_the_first_did_not_keep_a_technique(starts: Starts) -> None:
    starts.factors["cpu_threads"] = 1.5
    arguments = {"techniques": only(*PAYS, "compile"), "budget": 10}
    first, second, third = (starts.start(**arguments) for _ in range(3))
    expected = {"fused_optimizer": "kept", "cpu_threads": "rejected", "compile": "not tried"}
    for run in (first, second, third):
        assert {name: run.report.row(name).status for name in expected} == expected
    assert reasons(first.report.row("compile")) == {"setup-exceeds-budget", "budget-spent"}
    for run in (second, third):
        assert tried(run) == set()
        for name in ("cpu_threads", "compile"):
            assert "from-cache" in reasons(run.report.row(name))
            assert run.report.row(name).why.endswith(first.report.row(name).why)
    assert second.report.row("compile").why == third.report.row("compile").why
    assert untried(second.report.rows, ["cpu_threads", "compile"]) == untried(first.report.rows, ["compile"])


def test_an_older_plan_without_reasons_is_repeated(starts: Starts, plans: Path) -> None:
    starts.factors["cpu_threads"] = 1.5
    starts.start()
    data = json.loads(the_file(plans).read_text())
    assert data.pop("left_out").keys() == {"cpu_threads"}
    the_file(plans).write_text(json.dumps(data))
    second = starts.start()
    assert tried(second) == set()
    assert second.report.row("cpu_threads").status == "not tried"
    assert "from-cache" in reasons(second.report.row("cpu_threads"))


def test_none_tunes_again_and_overwrites(starts: Starts) -> None:
    starts.start()
    starts.factors = {"fused_optimizer": 0.5, "cpu_threads": 1.5}
    again = starts.start(plan=None)
    assert tried(again) == set(PAYS)
    third = starts.start()
    assert tried(third) == set()
    assert third.plan.decisions == again.plan.decisions == {"fused_optimizer": True}


@pytest.mark.parametrize("arguments", [{"budget": 0}, {"plan": "a plan"}, {"plan": "a path"}])
def test_a_given_plan_and_no_budget_neither_read_nor_write(
    arguments: dict[str, Any], starts: Starts, plans: Path, tmp_path: Path
) -> None:
    first = starts.start()
    first.plan.save(tmp_path / "plan.json")
    before = the_file(plans).read_bytes(), the_file(plans).stat().st_mtime_ns
    given = {"a plan": Plan({}, first.plan.fingerprint), "a path": tmp_path / "plan.json"}
    arguments = {name: given.get(value, value) for name, value in arguments.items()}
    run = starts.start(**arguments)
    assert tried(run) == set()
    assert "from-cache" not in notes(run)
    assert run.plan.decisions == (first.plan.decisions if isinstance(arguments.get("plan"), Path) else {})
    assert (the_file(plans).read_bytes(), the_file(plans).stat().st_mtime_ns) == before


def test_a_given_plan_is_not_raced(starts: Starts) -> None:
    plan = starts.start().plan
    starts.factors = dict.fromkeys(PAYS, 3.0)
    run = starts.start(plan=plan)
    assert run.plan == plan
    assert starts.start().plan.decisions == {}  # from the cache, and compared in a race


def test_a_plan_in_a_file_of_that_name_needs_a_path(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    starts.start().plan.save("cached")
    starts.factors = dict.fromkeys(PAYS, 3.0)
    assert starts.start(plan=Path("cached")).plan.decisions.keys() == set(PAYS)
    assert starts.start(plan="cached").plan.decisions == {}


def test_off_neither_reads_nor_writes(starts: Starts, plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", "off")
    assert tried(starts.start()) == tried(starts.start()) == set(PAYS)
    assert not plans.exists()


def test_another_key_is_tuned(starts: Starts) -> None:
    starts.start()
    assert tried(starts.start(max_grad_norm=1.0)) == set(PAYS)


def test_a_lost_race_tunes_again(starts: Starts) -> None:
    starts.start()
    starts.factors = {"fused_optimizer": 3.0, "cpu_threads": 0.9}
    second = starts.start()
    assert "cache-failed" in notes(second)
    assert tried(second) == set(PAYS)
    assert second.plan.decisions.keys() == {"cpu_threads"}
    third = starts.start()
    assert (third.plan, tried(third)) == (second.plan, set())


def test_the_race_is_short(starts: Starts, clock: Clock) -> None:
    """Six updates of 2 s and 1 s, and a few steps to warm up and to measure the pace."""
    starts.factors = {"fused_optimizer": 0.5}
    model, loader, optimizer = make_job()

    def start() -> float:
        step = TimedStep(clock, lambda samples, active: 2.0 if active else 4.0).watch(model, optimizer)
        run = flatout.optimize(
            model, loader, optimizer, step, techniques=only("fused_optimizer"), budget=10_000, expected_steps=10**6
        )
        run.undo()
        return run.report.summary.tuning_seconds

    first, second = start(), start()
    assert second < first / 2


class Scaled(OneCandidate):
    """Technique that is twice as fast, and scales the output by ``scale``."""

    name = "precision"
    title = "scaled outputs"

    def __init__(self) -> None:
        self.unseen = Unseen(scale=1.0, is_on=False)

    def change(self, job: Job) -> Candidate:
        def toggle(on: bool) -> None:
            self.unseen.is_on = on
            if on:  # trials restore the hooks of the model, so the candidate registers its own whenever it is turned on
                body: nn.Module = job.spec.model.body  # type: ignore[assignment]
                self.unseen.handle = body.register_forward_hook(lambda *call: call[-1] * self.unseen.scale)
            else:
                self.unseen.handle.remove()

        candidate = Change("scaled", lambda: toggle(True), lambda: toggle(False))
        candidate.value = True
        return candidate


@pytest.mark.parametrize(("scale", "is_kept"), [(1.0, True), (1.5, False)])
def test_numerics_are_compared_again(
    scale: float, is_kept: bool, the_only_techniques: Callable[..., None], clock: Clock, plans: Path
) -> None:
    technique = Scaled()
    the_only_techniques(technique)

    def start() -> flatout.Run:
        model, loader, optimizer = make_job()
        step = TimedStep(clock, lambda *_: SECONDS * (0.5 if technique.unseen.is_on else 1.0))
        run = flatout.optimize(model, loader, optimizer, step, budget=100, expected_steps=1000)
        run.undo()
        return run

    assert start().plan.decisions == {"precision": True}
    technique.unseen.scale = scale
    second = start()
    assert second.plan.decisions == ({"precision": True} if is_kept else {})
    assert ("numerics-differ" in notes(second)) is not is_kept
    assert bool(tried(second)) is not is_kept


@pytest.mark.parametrize(("stage", "good_calls"), [("warm_up", 0), ("warm_up", 1), ("race_once", 0)])
def test_an_error_turns_everything_off_and_tunes_again(
    stage: str, good_calls: int, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = starts.start()
    calls: list[Any] = []

    def fail(bench: Bench, *candidates: Candidate) -> None:
        calls.append(candidates)
        if len(calls) > good_calls:
            raise ZeroDivisionError

    monkeypatch.setattr(agenda, stage, fail)
    second = starts.start()
    assert "cache-failed" in notes(second)
    assert tried(second) == set(PAYS)
    assert second.plan == first.plan


@pytest.mark.parametrize("factors", [PAYS, dict.fromkeys(PAYS, 3.0)], ids=["holds", "loses"])
def test_a_cached_plan_leaves_no_trace(factors: dict[str, float], starts: Starts, clock: Clock) -> None:
    starts.start()
    starts.factors = dict(factors)
    model, loader, optimizer = make_job()
    before = snapshot(model, optimizer)
    step = TimedStep(clock, starts._seconds).watch(model, optimizer)
    before["hooks"] = snapshot(model)["hooks"]
    run = flatout.optimize(
        model, loader, optimizer, step, techniques=only(*PAYS), budget=100, expected_steps=1000
    )  # fmt: skip
    run.undo()
    assert snapshot(model, optimizer) == before


def test_what_does_not_apply_at_present_is_left_out(starts: Starts) -> None:
    first = starts.start()

    def check(self: CpuThreads, job: Job) -> None:
        raise NotApplicable("only one core may be used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuThreads, "check", check)
        second = starts.start()
    assert second.plan.decisions == {"fused_optimizer": True} != first.plan.decisions
    assert second.report.row("cpu_threads").status == "not applicable"
    third = starts.start()
    assert (tried(second), tried(third)) == (set(), set())
    assert third.plan == first.plan


def test_forced_techniques_are_forced_again(starts: Starts) -> None:
    techniques = only("cpu_threads", "fused_optimizer") | {"fused_optimizer": True}
    starts.factors["fused_optimizer"] = 1.1  # slower, but requested by the user
    first, second = (starts.start(techniques=techniques) for _ in range(2))
    assert first.plan == second.plan
    assert second.plan.decisions.keys() == set(PAYS)
    assert tried(second) == set()
    assert "from-cache" not in reasons(second.report.row("fused_optimizer"))


@pytest.mark.parametrize(("batch_size", "least"), [("auto", 64), (32, 32)])
def test_a_batch_size_is_repeated(batch_size: Any, least: int, starts: Starts) -> None:
    starts.overhead = 0.1  # larger batches are faster
    arguments = {"batch_size": batch_size, "techniques": only("batch_size", "fused_optimizer")}
    first, second = (
        starts.start(loader=DataLoader(make_data(2048), batch_size=16, shuffle=True), **arguments) for _ in range(2)
    )
    assert first.plan == second.plan
    assert second.plan.decisions["batch_size"]["samples"] >= least
    assert tried(second) == set()


def test_undecided_techniques_are_tried_by_the_next_start(starts: Starts, plans: Path) -> None:
    starts.factors["cpu_threads"] = 1.5
    assert starts.start().plan.decisions.keys() == {"fused_optimizer"}
    edit(plans, undecided=["cpu_threads"])
    starts.factors["cpu_threads"] = 0.7
    second = starts.start()
    assert tried(second) == {"cpu_threads"}
    assert second.plan.decisions.keys() == set(PAYS)
    assert Plan.load(the_file(plans)).undecided == []
    assert tried(starts.start()) == set()


def test_an_undecided_technique_is_tried_again_once(
    starts: Starts, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.factors["cpu_threads"] = 1.5
    starts.start()
    edit(plans, undecided=["cpu_threads"])
    monkeypatch.setattr(acceptance, "is_open", lambda *_: True)
    assert tried(starts.start()) == {"cpu_threads"}
    assert Plan.load(the_file(plans)).undecided == []
    assert tried(starts.start()) == set()


def test_a_technique_that_the_user_forbids_is_not_undecided(starts: Starts, plans: Path) -> None:
    starts.start()
    edit(plans, undecided=["compile"])
    before = the_file(plans).read_bytes()
    starts.start()
    assert the_file(plans).read_bytes() == before


@pytest.mark.parametrize(("then", "now", "tries"), [(99.0, 0.0, True), (99.0, 99.0, False), (0.0, 0.0, False)])
def test_a_plan_made_under_load_is_completed_on_a_quiet_machine(
    then: float, now: float, tries: bool, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.factors["cpu_threads"] = 1.5
    monkeypatch.setattr(session, "load_average", lambda: then)
    starts.start()
    monkeypatch.setattr(session, "load_average", lambda: now)
    assert tried(starts.start()) == ({"cpu_threads"} if tries else set())


class SlowSamples(torch.utils.data.Dataset):
    """Samples that take time on the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        self.clock.advance(0.01)
        return torch.full((8,), float(i)), i % 3


@pytest.fixture
def deterministic(clock: Clock, plans: Path) -> Callable[[float], flatout.Run]:
    """Function that starts a deterministic training with slow samples, and steps of a given time."""

    def start(step_seconds: float = 0.01) -> flatout.Run:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        loader = DataLoader(SlowSamples(clock), batch_size=8)
        techniques = only("in_memory", "precision", "fused_optimizer")
        run = flatout.optimize(
            model,
            loader,
            optimizer,
            TimedStep(clock, step_seconds),
            deterministic=True,
            seed=3,
            techniques=techniques,
            budget=1000,
            expected_steps=10**6,
        )
        run.undo()
        return run

    return start


def test_a_deterministic_start_repeats_a_plan_without_a_race(
    deterministic: Callable[..., flatout.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = deterministic()
    assert first.plan.decisions == {"in_memory": True}

    def loops(*_: Any) -> None:
        raise AssertionError("a race of a deterministic training")

    monkeypatch.setattr("flatout.tuning.bench.Bench.loops", loops)
    second = deterministic()
    assert (second.plan, tried(second)) == (first.plan, set())
    assert "from-cache" in notes(second)


def test_no_cached_plan_changes_the_numerics_of_a_deterministic_training(
    deterministic: Callable[..., flatout.Run], plans: Path
) -> None:
    first = deterministic()
    edit(plans, decisions={"fused_optimizer": True})
    second = deterministic()
    assert second.plan == first.plan
    assert "cache-failed" in notes(second)


def test_a_loader_that_cannot_be_rewound_loses_no_sample(clock: Clock, plans: Path) -> None:
    def start() -> tuple[flatout.Run, list[float]]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        step = TimedStep(clock, lambda samples, active: SECONDS * 0.5 if active else SECONDS).watch(model, optimizer)
        loader = DataLoader(Stream(160), batch_size=8)
        run = flatout.optimize(
            model, loader, optimizer, step, techniques=only("fused_optimizer"), budget=100, expected_steps=1000
        )
        return run, [float(x[0]) for batch, _ in run.loader for x in batch]

    (first, samples), (second, again) = start(), start()
    assert first.plan.decisions == second.plan.decisions == {"fused_optimizer": True}
    assert tried(second) == set()
    assert samples == again == [float(i) for i in range(160)]

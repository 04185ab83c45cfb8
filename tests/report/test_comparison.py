"""Comparison of two runs: verdicts, parts, changes, and sources that cannot be compared."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import flatout
from flatout.autotune import script_report
from flatout.profile import Profile, Step, shown_profile
from flatout.profile.profile_data import PHASES as PROFILE_PHASES
from flatout.report import Pace, Report, Summary, compare
from flatout.report.comparison import READABLE_PROFILES, READABLE_SCRIPTS, Comparison
from flatout.report.shown import Shown
from tests.jobs import Net, make_job, only
from tests.profile.profile_sample import ended_early
from tests.renderings.rendered import in_terminal
from tests.report.comparison_sample import CODE, ENVIRONMENT, FUSED, TRAINING, pace, run, script, summary


def changed(comparison: Comparison) -> dict[str, set[str]]:
    """Return the names of changed values, by kind."""
    found: dict[str, set[str]] = {}
    for change in comparison.changes:
        found.setdefault(change.kind, set()).add(change.name)
    return found


@pytest.mark.parametrize(
    ("after", "verdict", "mainly"),
    [
        (pace(), "same", ""),
        (pace(0.5, 3.0), "slower", "backward"),
        (pace(0.5, 1.5), "faster", "backward"),
        (pace(1.5, 2.0), "slower", "data"),
        (pace(0.5, 2.2, noise=0.5), "unknown", ""),
        (pace(0.5, 3.0, stretches=()), "unknown", ""),
        (pace(0.5, 3.0, stretches=((0.5, 3.0),)), "unknown", ""),
        (pace(0.5, 3.0, phases={}), "slower", "step"),
        (pace(0.5, 3.0, phases={"forward": 0.8, "backward": 0.1, "update": 0.1}), "slower", "forward"),
    ],
)
def test_verdict_and_main_part(after: Pace, verdict: str, mainly: str) -> None:
    (loop,) = compare(run(), run(after)).loops
    assert (loop.verdict, loop.mainly) == (verdict, mainly)
    assert loop.speed.ratio == pytest.approx(2.5 / after.total_ms)
    assert (loop.speed.interval is None) == (len(after.stretches) < 2)


def test_parts_have_verdicts_of_their_own() -> None:
    (loop,) = compare(run(), run(pace(1.5, 2.0))).loops
    verdicts = {part.name: part.verdict for part in loop.parts}
    assert verdicts == {"data": "slower", "step": "same", "forward": None, "backward": None, "update": None}
    assert loop.batch.verdict == "slower"
    assert {part.whole for part in loop.parts if part.name in ("forward", "backward", "update")} == {"step"}


def test_the_whole_interval_must_be_below_a_ratio_to_be_surely_slower() -> None:
    comparison = compare(run(), run(pace(0.5, 3.0)))
    speed = comparison.loops[0].speed
    assert comparison.is_slower_than(1.001 * speed.high)
    assert not comparison.is_slower_than(0.999 * speed.high)


def test_larger_batches_at_the_same_rate_are_as_fast() -> None:
    larger = run(pace(1.0, 4.0, samples=128.0), pace(2.0, 6.0, samples=128.0))
    comparison = compare(run(), larger)
    (loop,) = comparison.loops
    assert loop.speed.ratio == pytest.approx(1.0)
    assert {part.verdict for part in (*loop.parts, loop.batch, loop.untuned) if part} == {"same", None}
    assert (loop.batch.b_ms, loop.untuned.b_ms if loop.untuned else None) == pytest.approx((2.5, 4.0))
    assert changed(comparison) == {"batch size": {"samples"}}


def test_an_untuned_loop_of_other_batches_refers_to_the_same_samples() -> None:
    resized = run(pace(1.0, 4.0, samples=128.0), pace(1.0, 3.0, samples=64.0))
    (loop,) = compare(run(), resized).loops
    assert loop.untuned is not None
    assert loop.untuned.b_ms == pytest.approx(4.0)


CHANGES: dict[str, tuple[Summary, dict[str, set[str]]]] = {
    "code": (summary(code=CODE | {"Net": "0"}), {"code": {"Net"}}),
    "a new class": (summary(code=CODE | {"Extra": "0"}), {"code": {"Extra"}}),
    "model": (summary(training=TRAINING | {"model": "Net of 3 parameters (0)"}), {"model": {"model"}}),
    "batch": (summary(training=TRAINING | {"batch": "float32[9]"}), {"data": {"batch"}}),
    "loader": (summary(training=TRAINING | {"loader": "other"}), {"data": {"loader"}}),
    "optimizer": (summary(training=TRAINING | {"optimizer": "SGD"}), {"optimizer": {"optimizer"}}),
    "update": (summary(training=TRAINING | {"update": "accumulate=2"}), {"optimizer": {"update"}}),
    "precision": (summary(training=TRAINING | {"precision": "bfloat16"}), {"precision": {"precision"}}),
    "techniques": (summary(rows=()), {"techniques": {"fused_optimizer"}}),
    "a value": (summary(rows=(replace(FUSED, chosen="other"),)), {"techniques": {"fused_optimizer"}}),
    "rejected": (summary(rows=(replace(FUSED, status="rejected"),)), {"techniques": {"fused_optimizer"}}),
    "torch": (summary(environment=ENVIRONMENT | {"torch": "2.14.1"}), {"versions": {"torch"}}),
    "cores": (summary(environment=ENVIRONMENT | {"cores": "64"}), {"machine": {"cores"}}),
    "nothing": (summary(), {}),
}


@pytest.mark.parametrize(("other", "expected"), CHANGES.values(), ids=CHANGES)
def test_what_changed(other: Summary, expected: dict[str, set[str]]) -> None:
    comparison = compare(run(), Report(other))
    assert changed(comparison) == expected
    assert set(comparison.same).isdisjoint(expected)
    assert len(comparison.same) + len(expected) == 9
    assert comparison.unrecorded == ()


def test_older_reports_lack_the_training() -> None:
    older = run(training={}, code={})
    for comparison in (compare(run(), older), compare(older, run()), compare(older, older)):
        assert comparison.unrecorded == ("code", "model", "data", "precision", "optimizer")
        assert comparison.changes == ()


def on_slower_machine(**fields: Any) -> Report:
    return run(pace(1.0, 4.0), pace(2.0, 6.0), **fields)


@pytest.mark.parametrize(
    ("other", "verdict", "drifted"),
    [
        (on_slower_machine(), "same", True),
        (on_slower_machine(rows=()), "same", True),
        (run(pace(1.0, 8.0), pace(2.0, 6.0), rows=()), "slower", True),
        (run(pace(0.5, 3.0), pace(1.0, 3.0), rows=()), "slower", False),
        (on_slower_machine(code=CODE | {"Net": "0"}), "slower", False),
        (on_slower_machine(environment=ENVIRONMENT | {"cores": "1"}), "slower", False),
        (on_slower_machine(training={}), "slower", False),
    ],
)
def test_an_untuned_loop_that_is_the_same_shows_a_slower_machine(other: Report, verdict: str, drifted: bool) -> None:
    comparison = compare(run(), other)
    (loop,) = comparison.loops
    assert (loop.verdict, loop.drifted) == (verdict, drifted)
    assert comparison.is_slower_than(0.9) == (verdict == "slower")


@pytest.mark.parametrize(
    ("load", "cores", "disturbed"), [(2.1, "2", ("b",)), (2.0, "2", ()), (None, "2", ()), (9.0, "", ())]
)
def test_other_programs_are_named(load: float | None, cores: str, disturbed: tuple[str, ...]) -> None:
    b = run(load_average=load, environment=ENVIRONMENT | {"cores": cores})
    assert compare(run(load_average=0.1), b).disturbed == disturbed


@pytest.mark.parametrize(("load", "verdict"), [(0.1, "slower"), (9.0, "unknown")])
def test_a_small_difference_beside_other_programs_is_not_shown(load: float, verdict: str) -> None:
    b = run(pace(0.5, 2.15), load_average=load)
    (loop,) = compare(run(load_average=0.1), b).loops
    assert (loop.verdict, loop.parts[1].verdict) == (verdict, verdict)


def test_modules_of_scripts_are_compared_by_name() -> None:
    a = script(Generator=summary(), Critic=summary(), Gone=summary())
    b = script(New=summary(), Critic=summary(pace(0.5, 3.0), rows=()), Generator=summary())
    comparison = compare(a, b)
    assert [(loop.name, loop.verdict) for loop in comparison.loops] == [("Generator", "same"), ("Critic", "slower")]
    assert [(change.loop, change.name) for change in comparison.changes] == [("Critic", "fused_optimizer")]
    assert comparison.is_slower_than(0.9)


def test_facts_that_all_modules_share_are_named_once() -> None:
    def of(torch: str) -> Shown:
        each = summary(environment=ENVIRONMENT | {"torch": torch})
        return script(Generator=each, Critic=each)

    (change,) = compare(of("2.13.0"), of("2.14.1")).changes
    assert (change.loop, change.a, change.b) == ("", "2.13.0", "2.14.1")


def test_modules_of_one_class_are_compared_in_their_order() -> None:
    a, b = script(Net1=summary(), Net2=summary()), script(Net1=summary(), Net2=summary(pace(0.5, 3.0)))
    assert [(loop.name, loop.verdict) for loop in compare(a, b).loops] == [("Net", "same"), ("Net 2", "slower")]


def test_a_renamed_only_module_is_compared() -> None:
    assert compare(script(Net=summary()), script(Better=summary())).loops[0].verdict == "same"


def test_modules_without_a_pace_are_left_out() -> None:
    a = script(Generator=summary(), Critic=summary(after=None, before=None))
    b = script(Generator=summary(), Critic=replace(summary(), after=None))
    assert [loop.name for loop in compare(a, b).loops] == ["Generator"]


def profile(seconds: float, **phases: float) -> Profile:
    """Return a profile whose steps take these seconds, with some phases replaced."""
    shares = dict.fromkeys(PROFILE_PHASES, 0.0) | {"loader_wait": 0.006, "backward": 0.002} | phases
    steps = tuple(Step(seconds * each, {phase: each * s for phase, s in shares.items()}) for each in (0.99, 1.0, 1.01))
    return replace(ended_early(), steps=steps, seconds=seconds, phases=shares)  # type: ignore[arg-type]


def test_profiles_have_an_interval_for_each_phase() -> None:
    comparison = compare(profile(0.010), profile(0.014, backward=0.006))
    (loop,) = comparison.loops
    assert (loop.verdict, loop.mainly) == ("slower", "backward")
    assert {part.name: part.verdict for part in loop.parts} == {"data": "same", "backward": "slower"}
    assert (loop.samples, loop.untuned) == (32, None)
    assert "code" in comparison.unrecorded
    assert "versions" in comparison.same


def test_profiles_without_samples_are_compared_by_step() -> None:
    (loop,) = compare(replace(profile(0.01), samples=None), replace(profile(0.01), samples=64)).loops
    assert (loop.samples, loop.verdict) == (None, "same")


@pytest.mark.parametrize("source", [run(), script(Net=summary()), profile(0.01)], ids=["run", "script", "profile"])
def test_files_and_objects_compare_alike(source: Shown, tmp_path: Path) -> None:
    source.to_json(tmp_path / "a.json")
    from_files, from_objects = compare(tmp_path / "a.json", str(tmp_path / "a.json")), compare(source, source)
    assert replace(from_files, a="a", b="b") == from_objects
    assert from_files.a == str(tmp_path / "a.json")


def test_what_the_writers_write_is_readable() -> None:
    assert script_report.SCHEMA_VERSION in READABLE_SCRIPTS
    assert shown_profile.SCHEMA_VERSION in READABLE_PROFILES


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("3", "TypeError"),
        ("{}", "schema"),
        ('{"schema": 99}', "99"),
        ('{"schema": "flatout.script", "schema_version": 9}', "9"),
        ('{"schema": "flatout.script", "schema_version": 1, "modules": [3]}', "TypeError"),
        ('{"schema": 9, "profiled_steps": 1}', "9"),
        ('{"schema": 3, "profiled_steps": 1}', "steps"),
        ('{"schema_version": 3, "decisions": {}, "fingerprint": {}}', "schema"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_files_that_are_no_reports_are_refused(text: str, facts: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)^b must.*b\.json.*{facts}"):
        compare(run(), path)


@pytest.mark.parametrize("times", [(float("nan"), 1.0), (float("inf"), 1.0), (1e308, 1e308)])
def test_stretches_without_a_spread_are_no_error(times: tuple[float, float]) -> None:
    (loop,) = compare(run(), run(pace(stretches=((0.5, 2.0), times) * 6))).loops
    assert (loop.verdict, loop.speed.interval) == ("unknown", None)


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=r"^a must"):
        compare(tmp_path / "fifo", run())


UNMEASURED = {
    "nothing timed": Report(replace(summary(), before=None, after=None)),
    "no samples": run(Pace(1.0, 1.0, 0.0)),
    "no time": run(Pace(0.0, 0.0, 1.0)),
    "not a number": run(Pace(float("nan"), 0.0, 1.0)),
    "profile without time": profile(0.0),
    "profile of no number": profile(float("nan")),
    "no module": script(),
}


@pytest.mark.parametrize("source", UNMEASURED.values(), ids=UNMEASURED)
def test_runs_without_a_speed_are_refused(source: Shown) -> None:
    with pytest.raises(ValueError, match=r"^b must hold a measured speed"):
        compare(run(), source)


def test_a_file_with_an_endless_rate_is_refused(tmp_path: Path) -> None:
    data = run().to_dict()
    data["after"]["samples_per_second"] = float("inf")
    (tmp_path / "b.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"^b must hold a measured speed"):
        compare(run(), tmp_path / "b.json")


@pytest.mark.parametrize(
    ("a", "b"), [(run(), profile(0.01)), (run(), script(Net=summary())), (script(Net=summary()), profile(0.01))]
)
def test_sources_of_two_kinds_are_refused(a: Shown, b: Shown) -> None:
    with pytest.raises(ValueError, match=r"^a and b must be of one kind"):
        compare(a, b)


def test_scripts_without_a_common_module_are_refused() -> None:
    with pytest.raises(ValueError, match="Net, Other and New, Newer"):
        compare(script(Net=summary(), Other=summary()), script(New=summary(), Newer=summary()))


def test_the_json_holds_everything() -> None:
    comparison = compare(run(), run(pace(0.5, 3.0, stretches=()), rows=()))
    data = json.loads(comparison.to_json())
    assert (data["schema"], data["schema_version"]) == ("flatout.comparison", 1)
    (loop,) = data["loops"]
    assert loop["speed"] == {"ratio": pytest.approx(2.5 / 3.5), "low": None, "high": None}
    assert data["changes"] == [
        {"kind": "techniques", "name": "fused_optimizer", "a": "fused", "b": None, "loop": ""},
    ]
    assert len(data["same"]) == 8


def test_a_usual_comparison_fits_on_a_screen() -> None:
    other = run(
        pace(0.5, 3.0), rows=(), code=CODE | {"Net": "0"}, environment=ENVIRONMENT | {"torch": "2.14.1", "cores": "64"}
    )
    lines = in_terminal(compare(run(), other), 80).splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 80


def test_hostile_names_are_harmless() -> None:
    hostile = "<b>[red]\x1b[31mNet\u202e"
    a = script(**{hostile: summary(), "Other": summary()})
    b = script(**{hostile: summary(code={hostile: "0"}), "Other": summary(rows=(replace(FUSED, chosen=hostile),))})
    comparison = compare(a, b)
    text, page = in_terminal(comparison, 80), comparison._repr_html_()
    assert "<b>[red]Net\\u202e" in text
    assert not {"\x1b", "\u202e"} & {*text, *page, *str(comparison)}
    assert "<b>" not in page
    assert in_terminal(comparison, 80, ascii_only=True).isascii()


class Slower(Net):
    """Model that computes everything twice."""

    def forward(self, x: Any) -> Any:
        return self.body(x) + self.body(x)


def tuned(model: Net) -> Report:
    _, loader, _ = make_job()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tuning: dict[str, Any] = {"techniques": only("fused_optimizer"), "budget": 1.0, "expected_steps": 10**6}
    return flatout.optimize(model, loader, optimizer, cross_entropy, plan=None, **tuning).report


def test_real_runs_name_the_code_that_changed() -> None:
    comparison = compare(tuned(Net()), tuned(Slower()))
    assert comparison.unrecorded == ()
    assert {name.rpartition(".")[2] for name in changed(comparison)["code"]} == {"Net", "Slower"}
    assert {"data", "batch size", "precision", "optimizer", "versions"} <= {*comparison.same}
    assert comparison.loops[0].speed.interval is not None
    assert comparison.loops[0].untuned is not None

"""Causes: calls are identified by the lines that lead to them, and each remedy fits its measurement."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from flatout.advise.advice import Advice, explanation
from flatout.advise.batch_trial import seconds_of_sizes
from flatout.advise.causes import Cause, boxes_of, causes_of
from flatout.advise.observe import CallSite, LoaderSite, Observer
from flatout.advise.session import Observations
from flatout.autotune.recorder import RecordedCall
from flatout.autotune.script_report import ScriptReport
from flatout.data import Stage
from flatout.profile.profile_data import PHASES, Operator
from flatout.report import Gain, Row, Status
from tests.profile.profile_sample import ended_early
from tests.report.comparison_sample import script, summary

JOB = """\
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.ones(3, 4)
def run(x):
    return model(x)
def train():
    run(x).sum().backward()
    optimizer.step()
train()
observer.end_update()
"""
UNTIMED = ScriptReport([], updates=9, trained_seconds=1.0, tuning_seconds=1.0)


@pytest.fixture
def observer() -> Iterator[Observer]:
    made = Observer()
    yield made
    made.close()


def wasted(observer: Observer, text: str) -> list[str]:
    """Return the evaluations with gradients in a script of this text, after line 11."""
    exec(compile(JOB + text, "job.py", "exec"), {"observer": observer})
    causes = causes_of(Observations(observer, None, None, UNTIMED))
    return [cause.where for cause in causes if cause.code == "evaluation_with_gradients"]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("model.eval()\nrun(x)\n", ["job.py:13"]),
        ("model.eval()\nmodel(x)\n", ["job.py:13"]),
        ("run(x)\nobserver.end_update()\n", ["job.py:12"]),
        (
            "for b in (True, False):\n    model.train(b)\n    out = model(x)\n    if b: out.sum().backward()\n",
            ["job.py:14"],
        ),
        ("model.eval()\nwith torch.no_grad():\n    run(x)\n", []),
        ("model.eval()\nwith torch.inference_mode():\n    run(x)\n", []),
        ("@torch.no_grad()\ndef test():\n    return run(x)\nmodel.eval()\ntest()\n", []),
        ("model.eval()\nrun(x).sum().backward()\nobserver.end_update()\n", []),
        ("run(x)\n", []),
    ],
)
def test_evaluations_with_gradients(text: str, places: list[str], observer: Observer) -> None:
    assert wasted(observer, text) == places
    assert {"job.py:6", "job.py:8", "job.py:10"} <= observer.trained


def test_modules_within_calls_by_trials_are_not_the_users(observer: Observer) -> None:
    text = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.inner(x)
seconds_of_sizes(Net().eval(), RecordedCall.of((x,), {}))
"""
    trial = {"seconds_of_sizes": seconds_of_sizes, "RecordedCall": RecordedCall}
    exec(compile(JOB + text, "job.py", "exec"), {"observer": observer, **trial})
    assert [site.where for site in observer.calls] == ["job.py:6"]


def loader(workers: int, **fields: Any) -> LoaderSite:
    return replace(LoaderSite("job.py:1", workers, False, 8, is_stream=False), **fields)


def seen(loader: LoaderSite | None, wait: float, seconds: float = 0.1, row: Row | None = None) -> Observations:
    """Return observations of steps that wait for data for a share of their time."""
    observer = Observer()
    observer.close()
    observer.training = loader
    site = CallSite(("job.py:2",), "Net", "cpu", frozenset({torch.float32}), is_reached=True, gives_tensor=True)
    observer.calls.append(site)
    phases = dict.fromkeys(PHASES, 0.0) | {"loader_wait": wait * seconds}
    products = Operator("aten::addmm", 1.0, 0.8 * seconds, 0.0, 0.8)
    profile = replace(ended_early(), seconds=seconds, phases=phases, operators=(products,), syncs=())  # type: ignore[arg-type]
    report = UNTIMED if row is None else script(Net=summary(rows=(row,)))
    return Observations(observer, profile, None, report)


def found(observations: Observations, code: str) -> Cause | None:
    return next((cause for cause in causes_of(observations) if cause.code == code), None)


def row(technique: str, gain: float) -> Row:
    return Row(technique, None, technique, "kept" if gain > 1 else "rejected", "", "", Gain(gain, gain, gain))


@pytest.mark.parametrize(
    ("workers", "cores", "wait", "seconds", "measured", "gain", "remedy"),
    [
        (0, 4, 0.5, 0.1, None, 1 / 0.51, "more_workers"),
        (0, 2, 0.9, 0.1, None, 2.0, "more_workers"),
        (0, 1, 0.9, 0.1, None, None, "cheaper_samples"),
        (0, 1, 0.3, 0.1, None, None, None),
        (2, 2, 0.2, 0.1, None, None, None),
        (2, 2, 0.9, 0.1, None, None, "cheaper_samples"),
        (2, 8, 0.9, 0.1, None, 4.0, "more_workers"),
        (0, 2, 0.4, 0.001, None, None, None),
        (0, 4, 0.2, 0.1, 1.5, 1.5, "more_workers"),
        (0, 4, 0.3, 0.1, 0.8, None, None),
        (0, 4, 0.9, 0.1, 0.8, None, "cheaper_samples"),
    ],
)
def test_workers_are_advised_where_they_help(
    workers: int,
    cores: int,
    wait: float,
    seconds: float,
    measured: float | None,
    gain: float | None,
    remedy: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flatout.advise.causes.usable_cores", lambda: cores)
    trial = None if measured is None else row("workers", measured)
    observations = seen(loader(workers), wait, seconds, trial)
    cause = found(observations, "starved_loader")
    assert (cause and cause.values["remedy"]) == remedy
    assert (cause and cause.gain) == (None if gain is None else pytest.approx(gain))
    assert boxes_of(observations, causes_of(observations))[1].is_ticked is (cause is None)


NOISY = Gain(4.0, 0.9, 17.0)
SHOWN = {
    "kept": (Row("compile", 9, "compile", "kept", "", "", Gain(1.5, 1.3, 1.7)), 1.5),
    "kept without an interval above 1": (Row("compile", 9, "compile", "kept", "", "", NOISY), None),
    "rejected by one pair": (Row("compile", 9, "compile", "rejected", "", "", Gain(4.0)), None),
    "rejected after a gain": (Row("compile", 9, "compile", "rejected", "", "", Gain(1.5, 1.3, 1.7)), None),
    "undecided": (Row("compile", 9, "compile", "not tried", "", "", NOISY), None),
}


@pytest.mark.parametrize("name", SHOWN)
def test_only_a_shown_gain_is_one(name: str, tmp_path: Path) -> None:
    trial, gain = SHOWN[name]
    advice = Advice.of(seen(None, 0.0, row=trial), tmp_path)
    advice.to_json(tmp_path / "advice.json")
    (technique,) = json.loads((tmp_path / "advice.json").read_text())["techniques"]
    assert (technique["status"], technique["gain"]) == (trial.status, gain)
    console = Console(file=io.StringIO(), width=120)
    console.print(replace(advice, updates=1))
    assert ("compile" in console.file.getvalue()) is (gain is not None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("status", "remedy"), [("rejected", "cheaper_samples"), ("not tried", "more_workers")])
def test_a_noisy_gain_of_a_trial_is_no_advice(status: Status, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.advise.causes.usable_cores", lambda: 3)
    trial = Row("workers", 2, "workers", status, "", "", NOISY)
    cause = found(seen(loader(0), 0.9, row=trial), "starved_loader")
    assert cause is not None
    assert cause.values["remedy"] == remedy
    assert cause.gain != NOISY.ratio


def test_a_stream_gets_no_workers_by_a_diff() -> None:
    for is_stream in (False, True):
        cause = found(seen(loader(0, is_stream=is_stream), 0.5, row=row("workers", 1.5)), "starved_loader")
        assert cause is not None
        assert cause.is_sure is not is_stream


@pytest.mark.parametrize("wait", [0.9, 0.0])
def test_stages_of_loading_are_shown_for_a_starved_loader(wait: float, tmp_path: Path) -> None:
    stages = (Stage("decode", "PIL", "job.py:7", 2e-3, 0.75), Stage("read", "io", "job.py:6", 5e-4, 0.19, 4e-3))
    advice = Advice.of(replace(seen(loader(0), wait, row=row("workers", 0.9)), stages=stages), tmp_path)
    data = json.loads(advice.to_json())
    assert [each["place"] for each in data["stages"]] == (["job.py:7", "job.py:6"] if wait else [])
    text = " ".join(str(replace(advice, updates=1)).split())
    assert ("75 % decode PIL job.py:7" in text) is bool(wait)
    assert ("19 % read io job.py:6" in text) is bool(wait)


@pytest.mark.parametrize(("gain", "remedy"), [(1.5, "autocast"), (0.7, "no_bf16")])
def test_bf16_is_advised_where_it_helps(gain: float, remedy: str) -> None:
    cause = found(seen(None, 0.0, row=row("precision", gain)), "fp32_matmuls")
    assert cause is not None
    assert cause.values["remedy"] == remedy
    assert cause.is_sure is (gain > 1)
    assert cause.gain == (gain if gain > 1 else None)
    assert explanation(cause)

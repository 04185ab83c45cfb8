"""Remedies of a verdict, which are the techniques that a report leaves to try."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from torch import nn

import flatout
from flatout.mfu import Phases
from flatout.mfu.verdict import DENSE, Bottleneck, Verdict, judge
from flatout.report import Row, Status
from flatout.report.remedies import ARGUMENTS, untried
from flatout.techniques import REGISTRY
from flatout.training.device_verdict import REMEDIES, with_remedies
from flatout.tuning.choices import choices_of
from tests.mfu.test_verdict import phases

STATUSES: tuple[Status, ...] = get_args(Status)
TITLES = {technique.name: technique.title for technique in REGISTRY}
SITUATIONS = {
    "loader": {"phases": phases(loader_wait=1.0)},
    "copy": {"phases": phases(h2d=1.0)},
    "own code": {"phases": phases(host_idle=1.0)},
    "clocks": {"throttle": ("power limit",)},
    "launch": {"utilization": 0.5},
    "kernels": {"utilization": 0.99},
}


def row(technique: str, status: Status) -> Row:
    return Row(technique, None, TITLES[technique], status, "")


def names_of(technique: str) -> set[str]:
    """Return the names of a technique in sentences: title, name as code, and common name."""
    called = {"batch_size": "larger batches", "precision": "lower precision", "compile": "fusion"}
    names = {TITLES[technique], f"'{technique}'", f"{technique}=", called.get(technique, TITLES[technique])}
    return {name.lower() for name in names}


NAMES = {technique: names_of(technique) for technique in TITLES}


def named_in(sentences: str) -> set[str]:
    """Return the techniques that a text names."""
    text = sentences.lower()
    return {technique for technique, names in NAMES.items() if any(name in text for name in names)}


@pytest.mark.parametrize("bottleneck", SITUATIONS)
def test_no_sentence_names_a_decided_technique(bottleneck: Bottleneck) -> None:
    verdict = judge(0.1, "the peak", DENSE, **SITUATIONS[bottleneck])
    assert verdict.bottleneck == bottleneck
    techniques = REMEDIES.get(bottleneck, ())
    others = [row(name, "kept") for name in TITLES if name not in techniques]
    for statuses in product(("kept", "rejected", "not tried", "not applicable"), repeat=len(techniques)):
        decided = dict(zip(techniques, statuses, strict=True))
        said = str(with_remedies(verdict, [row(*item) for item in decided.items()] + others))
        assert named_in(said) == {name for name, status in decided.items() if status == "not tried"}


def test_a_verdict_without_rows_names_the_limit_and_stops() -> None:
    verdict = judge(0.1, "the peak", DENSE)
    assert with_remedies(verdict, ()) == verdict
    assert str(verdict).endswith("kernels.")


def test_every_remedy_is_a_technique_with_an_argument_that_optimize_takes() -> None:
    named = {name for techniques in REMEDIES.values() for name in techniques}
    assert named == ARGUMENTS.keys() <= TITLES.keys()
    for name, argument in ARGUMENTS.items():
        (keyword,) = ast.parse(f"optimize({argument})", mode="eval").body.keywords  # type: ignore[attr-defined]
        value = ast.literal_eval(keyword.value)
        if keyword.arg == "batch_size":
            assert (name, value) == ("batch_size", "auto")
            continue
        given: Mapping[str, object] = {"techniques": None, "precision": "auto"} | {keyword.arg: value}
        assert name in choices_of(**given).values  # type: ignore[arg-type]
        technique = next(technique for technique in REGISTRY if technique.name == name)
        assert technique.accepts(choices_of(**given).values[name])  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize("status", STATUSES)
def test_only_untried_techniques_are_left(status: Status) -> None:
    assert bool(untried([row("compile", status)], ["compile"])) == (status == "not tried")


def test_forbidden_techniques_are_not_left_to_try() -> None:
    assert untried([replace(row("compile", "not tried"), left_out=True)], ["compile"]) == []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 4
    arguments = (model, batches, optimizer, nn.functional.mse_loss)
    run = flatout.optimize(*arguments, budget=0, techniques={"compile": False})
    assert {row.technique for row in run.report.rows if row.left_out} == {"compile"}
    assert flatout.Report.from_json(run.report.to_json()).row("compile").left_out
    run.undo()
    planned = flatout.optimize(*arguments, plan=flatout.Plan(decisions={}, fingerprint=run.plan.fingerprint))
    assert planned.report.row("compile").left_out
    assert untried(planned.report.rows, ARGUMENTS) == []


def test_remedies_come_in_their_order_with_the_titles_of_their_rows() -> None:
    rows = [row("compile", "not tried"), row("precision", "not tried"), row("tf32", "rejected")]
    assert untried(rows, ("precision", "tf32", "compile", "no_such_row")) == [
        "mixed precision (precision='bf16')",
        "torch.compile (techniques={'compile': True})",
    ]


def test_the_verdict_of_a_run_names_the_techniques_that_are_left() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 4
    run = flatout.optimize(model, batches, optimizer, nn.functional.mse_loss, budget=0)
    run.fit(1, progress=False)
    left = [row.technique for row in run.report.rows if row.status == "not tried"]
    assert left
    verdict: Verdict = run.verdict
    assert list(verdict.remedies) == untried(run.report.rows, REMEDIES.get(verdict.bottleneck, ()))


def test_phases_decide_before_the_stall_of_a_window() -> None:
    spent = Phases(loader_wait=0.0, h2d=0.0, forward=1.0, backward=0.0, update=0.0, host_idle=0.0)
    assert judge(0.1, "the peak", DENSE, stall_fraction=0.9, phases=spent).bottleneck == "kernels"

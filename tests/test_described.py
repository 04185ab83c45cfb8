"""Results at a prompt and in a notebook: one line, and a page or a small table."""

import dataclasses
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import flatout
from flatout.autotune.script_report import ModuleReport, ScriptReport
from flatout.core.described import LONGEST, Described
from flatout.data.tuning import Try, Tuned
from flatout.mfu import FlopCount, FlopNode, MfuCounter, Phases, Reading, Verdict
from flatout.mfu.verdict import DENSE
from flatout.report import Comparison, Report, Summary, compare
from tests.jobs import make_job
from tests.profile.profile_sample import sync_bound
from tests.report import comparison_sample, report_sample

HOSTILE = '<img src=x onerror="alert(1)">\n\x1b[31m & more'
"""Text of a user that would break a line, color a terminal, or run in a notebook."""


class Balance(HTMLParser):
    """Parser that records the open elements, and all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def run() -> flatout.Run:
    model, loader, optimizer = make_job()
    return flatout.optimize(model, loader, optimizer, torch.nn.functional.cross_entropy, budget=0, plan=None)


def hostile_report() -> Report:
    summary = report_sample.sample()
    row = dataclasses.replace(summary.rows[0], title=HOSTILE, why=HOSTILE, status="kept", chosen=HOSTILE)
    return Report(dataclasses.replace(summary, rows=(row, *summary.rows[1:]), notes=(HOSTILE,), won=(row.technique,)))


def hostile_comparison() -> Comparison:
    compared = compare(comparison_sample.run(), comparison_sample.run())
    loops = (dataclasses.replace(compared.loops[0], name=HOSTILE),)
    return dataclasses.replace(compared, a=HOSTILE, loops=loops)


def reading() -> Reading:
    return Reading(1200, 76_800, 0, 9.0, 0.0075, 8533.3, None, 1e12, 0.41, 0.41, 0.01, None)


NODE = FlopNode(HOSTILE, 10**9, 2 * 10**9, 0, ())

RESULTS: dict[str, Callable[[], Described]] = {
    "report": lambda: Report(report_sample.sample()),
    "report on hostile names": hostile_report,
    "empty report": lambda: Report(Summary((), {})),
    "row": lambda: hostile_report().rows[0],
    "summary": lambda: hostile_report().summary,
    "script": lambda: ScriptReport([ModuleReport(HOSTILE, hostile_report())] * 2, 1200, 60.0, 5.0),
    "script without training": lambda: ScriptReport([], 0, 0.0, 0.0),
    "script of few updates": lambda: ScriptReport([], 1, 0.1, 0.0),
    "module": lambda: ModuleReport(HOSTILE, hostile_report()),
    "comparison": lambda: compare(comparison_sample.run(), comparison_sample.run()),
    "comparison of hostile names": hostile_comparison,
    "profile": sync_bound,
    "profile with hostile advice": lambda: dataclasses.replace(sync_bound(), advice=(HOSTILE,)),
    "plan": lambda: flatout.Plan({"precision": HOSTILE, "compile": True}, {"model": HOSTILE}, undecided=(HOSTILE,)),
    "empty plan": lambda: flatout.Plan({}, {}),
    "verdict": lambda: Verdict(0.41, HOSTILE, DENSE, 0.9, HOSTILE, "kernels", (HOSTILE,)),
    "unknown verdict": lambda: Verdict(None, "", DENSE, None, ""),
    "counter before a step": lambda: MfuCounter(device="cpu"),
    "reading": reading,
    "phases": lambda: Phases(0.001, 0.0, 0.002, 0.003, 0.001, 0.0),
    "FLOPs": lambda: FlopCount(10**9, 2 * 10**9, 0, 3 * 10**9, NODE, {}, {HOSTILE: 3}),
    "FLOPs of a module": lambda: NODE,
    "tuned loader": lambda: Tuned(None, 2, 4, True, None, 0.1, 0.01, 0.0, 1.0, (Try(0, 10.0, 1.0),), HOSTILE),
}  # fmt: skip


def check(shown: Described) -> None:
    line = repr(shown)
    assert line.startswith(f"<flatout.{type(shown).__name__}")
    assert line.isprintable()
    assert len(line) <= LONGEST
    page = shown._repr_html_()
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "img" not in parser.seen
    assert "\x1b" not in page


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_one_line_and_a_balanced_escaped_page(name: str) -> None:
    check(RESULTS[name]())


def test_an_object_that_is_not_complete_is_shown() -> None:
    for kind in {type(make()) for make in RESULTS.values()} | {flatout.Run}:
        assert repr(kind.__new__(kind)) == f"<flatout.{kind.__name__}>"


def test_a_run_is_shown_before_its_first_step_after_steps_and_after_a_failure(run: flatout.Run) -> None:
    seen = [repr(run)]
    check(run)
    batch = next(iter(run.loader))
    run.step(batch)
    seen.append(repr(run))
    check(run)
    with pytest.raises(RuntimeError):
        run.step([torch.zeros(1), torch.zeros(2)])
    check(run)
    run.undo()
    check(run)
    assert "step 0" in seen[0]
    assert "step 1" in seen[1]


def test_showing_a_run_reads_no_batch_and_draws_no_random_number(run: flatout.Run) -> None:
    before, steps = torch.get_rng_state(), run.steps
    original, opened = type(run.loader).__iter__, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.loader), "__iter__", lambda self: opened.append(self) or original(self))
        check(run)
    assert not opened
    assert torch.equal(torch.get_rng_state(), before)
    assert run.steps == steps


def test_what_auto_returns_is_shown_before_a_training() -> None:
    with flatout.auto() as tuning:
        check(tuning)
        check(tuning.report)
    check(tuning)

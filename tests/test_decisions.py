"""What optimize() decides, reports and plans."""

import pytest
import torch
from torch.nn import functional

import flatout
from flatout.techniques import PLANNED, REGISTRY, Measured
from tests.jobs import make_job

pytestmark = pytest.mark.usefixtures("short_trials")


def test_every_row_is_in_the_report():
    model, loader, opt = make_job()
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0)
    rows = {row.technique: row for row in run.report.rows}
    assert rows.keys() == {t.name for t in REGISTRY} | {name for _, name, _, _ in PLANNED}
    assert {r.number for r in rows.values() if r.number} == set(range(1, 14))
    assert all(row.why for row in rows.values())
    assert all(rows[name].status == "not built yet" for _, name, _, _ in PLANNED)
    measured = [rows[t.name] for t in REGISTRY if isinstance(t, Measured)]
    assert {row.status for row in measured} <= {"not tried", "not applicable"}
    text = str(run.report)
    assert all(row.title in text for row in rows.values())


def test_forbidden_and_forced_rows_say_so():
    model, loader, opt = make_job()
    run = flatout.optimize(
        model,
        loader,
        opt,
        functional.cross_entropy,
        techniques={"compile": False, "in_memory": True},
        budget=0,
    )
    rows = {row.technique: row for row in run.report.rows}
    assert "does without it" in rows["compile"].why
    assert rows["in_memory"].status == "kept"
    assert "asks for it" in rows["in_memory"].why


def test_deterministic_mode_times_only_what_is_bit_identical():
    model, loader, opt = make_job()
    try:
        run = flatout.optimize(
            model,
            loader,
            opt,
            functional.cross_entropy,
            deterministic=True,
            seed=3,
            techniques={"workers": False},
        )
        tried = {row.technique for row in run.report.rows if row.trials}
        assert tried <= {"determinism", "in_memory"}
        first = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(3), first)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        flatout.undo(model)
    assert not torch.are_deterministic_algorithms_enabled()

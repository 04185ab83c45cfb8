"""Ledger of decisions: the valid decision, and reverts of trials."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.optimize import _in_order
from flatout.report.model import Row
from flatout.techniques import REGISTRY, PairCandidate
from flatout.tuning.ledger import Decision, Ledger
from tests.tuning.harness import Change


def row(technique: str, status: str = "kept") -> Row:
    return Row(technique, None, technique, status, "why")  # type: ignore[arg-type]


def candidate(name: str) -> Change:
    return Change(name, lambda: None, lambda: None)


def test_the_latest_decision_to_keep_a_technique_counts() -> None:
    ledger = Ledger()
    first, second = candidate("first"), candidate("second")
    ledger.add(Decision(row("a"), "choice", 1, first))
    ledger.add(Decision(row("a"), "trial", 2, second))
    assert ledger.add(Decision(row("a", "rejected"))).status == "kept"
    assert ledger.values == {"a": 2}
    assert ledger.candidates == [first, second]
    assert [r.status for r in ledger.rows] == ["kept"]


def test_reverted_trials_leave_choices_and_rejections() -> None:
    ledger = Ledger()
    ledger.add(Decision(row("a"), "choice", 1, candidate("a")))
    ledger.add(Decision(row("a"), "trial", 2, candidate("b")))
    ledger.add(Decision(row("c"), "trial", 3, candidate("c")))
    ledger.revert(ledger.won, lambda kept: replace(kept, status="rejected"))
    assert ledger.values == {"a": 1}
    assert {r.technique: r.status for r in ledger.rows} == {"a": "kept", "c": "rejected"}
    assert not ledger.won


def test_trials_are_reverted_one_at_a_time() -> None:
    ledger = Ledger()
    for name in ("a", "b", "a"):
        ledger.add(Decision(row(name), "trial", name, candidate(name)))
    first, second, third = ledger.won
    ledger.revert([third], lambda kept: replace(kept, status="rejected"))
    assert ledger.won == [first, second]
    assert ledger.row("a").status == "kept"
    ledger.revert([first], lambda kept: replace(kept, status="rejected"))
    assert ledger.won == [second]
    assert ledger.candidates == [second.candidate]
    assert {r.technique: r.status for r in ledger.rows} == {"a": "rejected", "b": "kept"}


def test_candidates_of_rules_are_apart_from_those_of_trials() -> None:
    ledger, rule = Ledger(), candidate("rule")
    ledger.add(Decision(row("rule"), "rule", candidate=rule))
    assert ledger.rules == {"rule": rule}
    assert ledger.candidates == []
    assert ledger.values == {}


def test_rows_are_amended_where_they_count() -> None:
    ledger = Ledger()
    ledger.add(Decision(row("a"), "choice", 1))
    ledger.add(Decision(row("a", "rejected")))
    ledger.amend(replace(row("a"), why="because"))
    assert ledger.row("a").why == "because"
    with pytest.raises(KeyError):
        ledger.row("b")


def test_rows_of_a_report_keep_the_order_of_the_registry() -> None:
    names = [technique.name for technique in REGISTRY if technique.number is None]
    rows = [row(name) for name in reversed(names)]
    assert [r.technique for r in _in_order(rows) if r.technique in names] == names


def test_a_pair_is_on_together_or_not_at_all() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    on: list[str] = []
    first = Change("first", lambda: on.append("first"), on.clear)
    with pytest.raises(RuntimeError, match="no"), PairCandidate(first, Change("second", fail, lambda: None), "both"):
        pass
    assert on == []

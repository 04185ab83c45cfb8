"""Rows of the report from given trials."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from flatout.report import Gain, Row, Trial
from flatout.tuning import acceptance
from flatout.tuning.acceptance import KEEP_ABOVE, NO_SLOWER, earns, is_open, rank, ratio, row_of, saves_memory
from flatout.tuning.pairs import Noise, PairedTrial, difference
from flatout.tuning.statistics import Factorial
from flatout.tuning.stopwatch import Block
from tests.reasons import reasons
from tests.tuning.harness import trial

ROW = Row("candidate", 1, "a candidate", "kept", "it is fast")
ONE_PAIR = Gain(2.0, 0.0, math.inf)
FASTER, EVEN, SLOWER, UNSURE = Gain(2.0, 1.9, 2.1), Gain(1.0, 0.99, 1.01), Gain(0.5, 0.4, 0.6), Gain(1.2, 0.9, 1.5)


def test_the_row_of_a_faster_candidate_has_its_gain() -> None:
    best = trial(FASTER, after=300)
    row = row_of(ROW, [trial(EVEN), best], best)
    assert (row.status, row.chosen, row.gain, row.memory, row.why) == ("kept", "x", FASTER, 1.5, ROW.why)
    assert len(row.trials) == 2


def test_the_row_of_a_candidate_that_is_kept_for_its_memory_has_that_reason() -> None:
    best = trial(EVEN, after=100)
    row = row_of(ROW, [best], best)
    assert (row.status, row.gain, row.memory) == ("kept", EVEN, 0.5)
    assert "saves-memory" in reasons(row)


@pytest.mark.parametrize(
    ("trials", "code", "gain"),
    [
        ([trial(SLOWER)], "not-faster", SLOWER),
        ([trial(UNSURE)], "not-shown-to-be-faster", UNSURE),
        ([trial(ONE_PAIR, pairs=1)], "not-shown-to-be-faster", ONE_PAIR),
        ([trial(SLOWER), trial(EVEN), trial(None, failure="it ran out of memory: x")], "not-faster", EVEN),
        ([trial(None, failure="it ran out of memory: x")], "out-of-memory", None),
    ],
)
def test_the_row_of_rejected_candidates_is_of_the_closest(trials: list[Trial], code: str, gain: Any) -> None:
    row = row_of(ROW, trials, None)
    assert (row.status, row.chosen, row.gain, row.trials) == ("rejected", "", gain, tuple(trials))
    assert code in reasons(row)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [([], True), ([UNSURE], True), ([EVEN], False), ([EVEN, ONE_PAIR], True), ([Gain(0.2, 0.0, math.inf)], False)],
)
def test_a_technique_is_open_if_more_pairs_could_show_a_gain(gains: list[Gain], expected: bool) -> None:
    assert is_open([trial(gain) for gain in gains]) == expected
    assert is_open([*map(trial, gains), trial(None, failure="it failed")]) == (expected and bool(gains))


def test_without_a_trial_nothing_was_tried() -> None:
    row = row_of(ROW, [], None)
    assert row.status == "not tried"
    assert "budget-spent" in reasons(row)


def test_speed_comes_before_memory() -> None:
    fast, small, smaller, failed = (
        trial(FASTER),
        trial(EVEN, after=150),
        trial(EVEN, after=100),
        trial(None, failure="wrong"),
    )
    assert sorted([fast, small, smaller], key=rank) == [small, smaller, fast]
    assert [earns(each) for each in (fast, small, failed)] == [True, False, False]
    assert [acceptance.is_kept(each) for each in (fast, small, trial(EVEN), failed)] == [True, True, False, False]
    assert [earns(each, has_other_merits=True) for each in (fast, trial(EVEN), trial(SLOWER), failed)] == [
        True,
        True,
        False,
        False,
    ]
    assert ratio(failed) == 0.0


@pytest.mark.parametrize(("low", "kept"), [(KEEP_ABOVE + 1e-6, True), (KEEP_ABOVE, False), (0.9, False)])
def test_only_a_sure_gain_is_kept(low: float, kept: bool) -> None:
    assert earns(trial(Gain(1.2, low, 1.3))) is kept


@pytest.mark.parametrize(("low", "spared"), [(NO_SLOWER + 1e-6, True), (NO_SLOWER, False), (0.0, False)])
def test_only_what_is_surely_no_slower_uses_less_of_the_machine(low: float, spared: bool) -> None:
    assert earns(trial(Gain(1.0, low, 1.3)), has_other_merits=True) is spared


def test_a_candidate_that_saves_memory_must_surely_be_no_slower() -> None:
    assert saves_memory(trial(EVEN, 200, 180))
    assert not saves_memory(trial(EVEN, 200, 192))
    assert not saves_memory(trial(EVEN, 20, 10))  # too small to matter
    assert not saves_memory(trial(SLOWER, 200, 10))
    assert not saves_memory(trial(UNSURE, 200, 10))
    assert not saves_memory(trial(ONE_PAIR, 200, 10, pairs=1))
    assert not saves_memory(trial(EVEN, 200, 180, failure="wrong"))
    assert not saves_memory(trial(EVEN, None, 180))
    assert not saves_memory(trial(None, 200, 180))


def test_trials_and_combinations_ask_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain of two is not enough if the rule asks for three."""
    blocks = Block((2.0,), 2.0), Block((1.0,), 1.0)
    noise = Noise.of([(blocks[0], blocks[0])] * 8, one_thread=True)

    def kept() -> set[bool]:
        paired, factorial = PairedTrial(noise), Factorial([["factor"]], noise.floors["wall"])
        for _ in range(8):
            paired.add(blocks)
            factorial.add(["factor"], [], difference((blocks[0], blocks[1]), "wall"))
        return {earns(trial(paired.gain)), paired.verdict == "faster", factorial.kept == ["factor"]}

    assert kept() == {True}
    monkeypatch.setattr(acceptance, "limits", lambda noise, **merits: (3.0, 3.5))
    assert kept() == {False}


def test_the_rule_knows_the_noise_of_each_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of half the noise keeps a gain of 4 % with noise of 2 %, and rejects the same gain with noise of 20 %."""

    def limits(noise: float | None, **merits: bool) -> tuple[float, float]:
        least = 1 + max(0.01, (noise or 0.0) / 2)
        return least, least + 0.02

    monkeypatch.setattr(acceptance, "limits", limits)
    gain = Gain(1.04, 1.03, 1.05)
    quiet, noisy = (replace(trial(gain), noise=noise) for noise in (0.02, 0.2))
    assert [earns(quiet), earns(noisy)] == [True, False]
    assert "10 %" in row_of(ROW, [noisy], None).why

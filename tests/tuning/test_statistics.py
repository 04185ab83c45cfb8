"""Median of paired ratios and its bootstrap interval."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.report.model import Gain
from flatout.tuning.statistics import paired_gain
from flatout.tuning.trial import FEWEST_PAIRS, KEEP_ABOVE, interleave, pays

times = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=40)


@settings(max_examples=25)
@given(times, st.floats(0.1, 10.0))
def test_a_constant_speedup_is_found_whatever_the_machine_does(baseline, speedup):
    gain = paired_gain(baseline, [t / speedup for t in baseline])
    assert gain.ratio == pytest.approx(speedup)
    assert gain.low == pytest.approx(speedup)
    assert gain.high == pytest.approx(speedup)


@given(times, st.integers(0, 1000))
def test_the_interval_holds_the_ratio_and_inverts_with_the_roles(baseline, seed):
    candidate = [
        t * f for t, f in zip(baseline, np.random.default_rng(seed).uniform(0.5, 2, len(baseline)), strict=True)
    ]
    gain = paired_gain(baseline, candidate)
    assert gain.low <= gain.ratio <= gain.high
    if len(baseline) % 2:
        assert paired_gain(candidate, baseline).ratio == pytest.approx(1 / gain.ratio)


def test_the_interval_covers_the_truth_about_as_often_as_its_level():
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        ratios = 1.05 * np.exp(random.normal(0, 0.1, 25))
        gain = paired_gain(list(ratios), [1.0] * 25)
        covered += gain.low <= 1.05 <= gain.high
    assert 0.90 <= covered / 300 <= 1.0


def test_no_global_random_state_is_drawn():
    before = np.random.get_state()[1].tobytes()
    paired_gain([1.0, 2.0], [1.0, 1.0])
    assert np.random.get_state()[1].tobytes() == before


@pytest.mark.parametrize(("old", "new"), [([], []), ([1.0], [1.0, 2.0])])
def test_unpaired_times_are_refused(old, new):
    with pytest.raises(ValueError, match=f"{len(old)}.*{len(new)}"):
        paired_gain(old, new)


NEVER = float("inf")


def test_interleaving_alternates_the_order_and_stops_when_clear():
    order = []

    def measure(name, seconds):
        return lambda i: order.append((name, i)) or seconds

    old, new = interleave(measure("old", 2.0), measure("new", 1.0), NEVER, NEVER)
    assert len(old) == len(new) == 2 * FEWEST_PAIRS
    assert order[:4] == [("old", 0), ("new", 0), ("new", 1), ("old", 1)]


def test_a_hopeless_candidate_is_dropped_early_and_never_pays():
    old, new = interleave(lambda i: 1.0, lambda i: 2.0, NEVER, NEVER)
    assert len(old) == 3
    assert not pays(paired_gain(old, new), len(old))


def test_the_soft_deadline_leaves_the_pairs_that_a_verdict_needs():
    old, new = interleave(lambda i: 2.0, lambda i: 1.0, 0.0, NEVER)
    assert len(old) == FEWEST_PAIRS
    assert pays(paired_gain(old, new), len(old))


def test_the_hard_deadline_leaves_one_pair_which_cannot_pay():
    old, new = interleave(lambda i: 2.0, lambda i: 1.0, 0.0, 0.0)
    assert (old, new) == ([2.0], [1.0])
    assert not pays(paired_gain(old, new), len(old))


def test_without_a_gain_candidates_are_hardly_ever_kept():
    random = np.random.default_rng(2)
    kept = 0
    for _ in range(200):
        times = iter(np.exp(random.normal(0, 0.05, 1000)))
        old, new = interleave(lambda i, t=times: next(t), lambda i, t=times: next(t), NEVER, NEVER)
        kept += pays(paired_gain(old, new), len(old))
    assert kept / 200 <= 0.05


@pytest.mark.parametrize(("low", "kept"), [(KEEP_ABOVE + 1e-6, True), (KEEP_ABOVE, False), (0.9, False)])
def test_only_a_sure_gain_pays(low, kept):
    assert pays(Gain(ratio=1.2, low=low, high=1.3), pairs=10) is kept

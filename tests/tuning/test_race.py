"""Race of the tuned loop against the original, which takes as many pairs as the remaining time allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

import flatout
from flatout.tuning import pairs as paired
from flatout.tuning import race
from flatout.tuning.pairs import Pair
from flatout.tuning.statistics import FEWEST_PAIRS
from tests.clock import Clock, TimedSamples, TimedStep
from tests.jobs import make_job, only


@pytest.mark.parametrize(("later", "pairs"), [(0.0, race.MOST_RACE_PAIRS), (110.0, FEWEST_PAIRS)])
def test_a_race_whose_later_pairs_are_slow_ends_with_the_budget(
    later: float, pairs: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    def measure_pairs(*loops: Any, **order: Any) -> Iterator[Pair]:
        nonlocal taken
        for pair in paired.measure_pairs(*loops, **order):
            taken += 1
            yield pair
            clock.advance(later)

    monkeypatch.setattr(race, "measure_pairs", measure_pairs)
    model, _, optimizer = make_job()
    loader = DataLoader(TimedSamples(clock, 0.0), batch_size=8)
    step = TimedStep(clock, lambda _, active: 0.1 if active else 0.2).watch(model, optimizer)
    chosen = only("fused_optimizer")
    flatout.optimize(model, loader, optimizer, step, techniques=chosen, budget=100.0, plan=None)
    assert taken == pairs

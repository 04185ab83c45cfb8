"""All ranks decide alike: under noise, on different machines, and after failures at any place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.tuning import lockstep_checks as checks

RUNS = 20
"""Random runs without ``--jobs``."""


@pytest.mark.slow
def test_all_ranks_decide_alike(pair: RankPool, request: pytest.FixtureRequest) -> None:
    """Each run has noise, and a failure on a random rank at a random place."""
    first, runs = request.config.getoption("--seed"), request.config.getoption("--jobs") or RUNS
    for seed in range(first, first + runs):
        pair(checks.run_ends_alike, seed)


def test_loops_train_for_equally_many_batches(pair: RankPool) -> None:
    pair(checks.loops_train_for_equally_many_batches)


@pytest.mark.parametrize("call", [1, 3, 6])
def test_an_error_of_the_users_loss_ends_all_ranks(pair: RankPool, call: int) -> None:
    pair(checks.an_error_of_the_loss_ends_all_ranks, call)


@pytest.mark.parametrize("argument", [{"budget": 3.0}, {"techniques": {"compile": False}}, {"accumulate": 2}])
def test_arguments_that_differ_between_ranks_are_rejected(pair: RankPool, argument: dict[str, Any]) -> None:
    pair(checks.arguments_that_differ_are_rejected, **argument)


def test_candidates_that_differ_between_ranks_do_not_apply(pair: RankPool) -> None:
    pair(checks.candidates_that_differ_do_not_apply)


@pytest.mark.slow
def test_a_cached_plan_is_that_of_rank_0(pair: RankPool, tmp_path: Path) -> None:
    pair(checks.a_cached_plan_is_that_of_rank_0, str(tmp_path))

"""Evaluation on several ranks: each computes its slice, and all return the values of one process."""

from __future__ import annotations

import pytest

from tests.distributed import evaluation_checks as checks
from tests.ranks import RankPool


@pytest.mark.parametrize("loss", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("samples", [36, 41, 37, 1])  # batches of 12: the last one has 12, 5 samples, or 1
def test_each_rank_computes_its_slice(pool: RankPool, samples: int, loss: str) -> None:
    pool(checks.each_rank_computes_its_slice, samples, loss, shuffle=samples == 41, workers=0)


def test_workers_load_slices(pool: RankPool) -> None:
    pool(checks.each_rank_computes_its_slice, 41, "mean", shuffle=False, workers=1)


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_other_loaders_are_evaluated_whole(pool: RankPool, kind: str) -> None:
    pool(checks.other_loaders_are_evaluated_whole, kind)


def test_shards_are_evaluated_together(pool: RankPool) -> None:
    pool(checks.shards_are_evaluated_together)


def test_the_training_loader_is_evaluated(pool: RankPool) -> None:
    pool(checks.the_training_loader_is_evaluated)


def test_fit_evaluates(pool: RankPool) -> None:
    pool(checks.fit_evaluates)


@pytest.mark.parametrize("loss", ["mean", "weighted"])
def test_a_failure_on_one_rank_ends_the_evaluation(pool: RankPool, loss: str) -> None:
    pool(checks.a_failure_on_one_rank_ends_the_evaluation, loss)


def test_an_empty_loader_and_other_metrics_are_refused(pool: RankPool) -> None:
    pool(checks.an_empty_loader_and_other_metrics_are_refused)

"""All ranks find the same batch size, and the same parts of batches."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool
from tests.tuning import size_checks as checks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("samples", [16, 9])
def test_a_given_size_is_that_of_all_ranks(pool: RankPool, samples: int) -> None:
    pool(checks.a_given_size_is_that_of_all_ranks, samples)


def test_parts_of_a_given_size_stay_in_its_plan(pair: RankPool) -> None:
    pair(checks.parts_of_a_given_size_stay_in_its_plan)


@pytest.mark.parametrize("slow", [0, 1])
def test_auto_takes_larger_batches_where_they_are_faster(pool: RankPool, slow: int) -> None:
    pool(checks.auto_takes_larger_batches_where_they_are_faster, slow)


def test_auto_keeps_to_the_memory_limit(pair: RankPool) -> None:
    pair(checks.auto_keeps_to_the_memory_limit)


@pytest.mark.parametrize("slow", [0, 1])
def test_parts_that_are_faster_on_the_slowest_rank_are_found(pool: RankPool, slow: int) -> None:
    pool(checks.parts_that_are_faster_on_the_slowest_rank_are_found, slow)


@pytest.mark.parametrize("budget", [0, 1000])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_without_memory_splits_the_batches_of_all(pair: RankPool, where: str, rank: int, budget: float) -> None:
    pair(checks.a_rank_without_memory_splits_the_batches_of_all, where, rank, budget)


def test_no_sample_fits(pair: RankPool) -> None:
    pair(checks.no_sample_fits)


def test_ranks_on_one_machine_share_its_memory(pair: RankPool) -> None:
    pair(checks.ranks_on_one_machine_share_its_memory)


def test_the_buckets_of_ddp_stay(pair: RankPool) -> None:
    pair(checks.the_buckets_of_ddp_stay)


def test_ranks_that_train_apart_keep_their_batches(pair: RankPool) -> None:
    pair(checks.ranks_that_train_apart_keep_their_batches)


@pytest.mark.parametrize("budget", [0, 1000])
def test_checkpoints_make_room_on_all_ranks(pair: RankPool, budget: float) -> None:
    pair(checks.checkpoints_make_room_on_all_ranks, budget)

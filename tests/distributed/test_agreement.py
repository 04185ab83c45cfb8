"""Agreement of ranks: values, failures at any place, and lost ranks."""

from __future__ import annotations

import time

import pytest

from flatout.distributed.agreement import ALONE
from tests.distributed import agreement_checks as checks
from tests.ranks import RankPool


@pytest.fixture(scope="module", params=[2, 3])
def pool(request, tmp_path_factory):
    with RankPool(request.param, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.mark.parametrize(
    "check",
    [
        checks.values_are_those_of_all,
        checks.ranks_of_several_machines_agree,
        checks.a_failure_stops_all_ranks,
        checks.the_same_error_of_all_ranks_stays,
        checks.an_outer_failure_passes_inner_handlers,
        checks.inner_and_outer_failures_end_in_the_outer_attempt,
        checks.a_failure_before_a_call_stops_the_ranks_that_make_it,
        checks.out_of_memory_is_told_apart,
        checks.groups_do_not_mix,
    ],
)
def test_agreement(pool, check):
    pool(check)


def test_any_program_of_attempts_takes_one_path(pool):
    for seed in range(60):
        pool(checks.any_program_ends_alike, seed)


def test_alone_agrees_with_itself():
    assert ALONE.largest([1.0, 2.0]) == ALONE.smallest([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.first("value") == "value"
    assert ALONE.every("value") == ["value"]
    before = time.perf_counter()
    assert before <= ALONE.now() <= time.perf_counter()
    ALONE.check()
    with pytest.raises(KeyError), ALONE.attempt():
        raise KeyError("own")

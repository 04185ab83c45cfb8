"""Options of the reducer: gradients of plain DDP bit for bit, also after failures and exchanges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from flatout.distributed.gradient_sync import ReducerOptions
from tests.distributed import reducer_checks as checks
from tests.ranks import RankPool

CASES = checks.CASES


def _name(options: ReducerOptions) -> str:
    return "+".join(name for name in checks.CHANGES if getattr(options, name)) or "default"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.mark.parametrize("unused", ["", "always", "on rank 1"])
@pytest.mark.parametrize("options", CASES, ids=_name)
def test_steps_equal_those_of_ddp(pair: RankPool, options: ReducerOptions, unused: str) -> None:
    pair(checks.steps_equal_those_of_ddp, options, unused)


@pytest.mark.parametrize("options", CASES, ids=_name)
def test_steps_of_four_ranks_equal_those_of_ddp(four: RankPool, options: ReducerOptions) -> None:
    four(checks.steps_equal_those_of_ddp, options, "on rank 1")


@pytest.mark.parametrize("options", CASES[:5], ids=_name)
def test_gradients_of_two_dtypes_equal_those_of_ddp(pair: RankPool, options: ReducerOptions) -> None:
    pair(checks.gradients_of_two_dtypes_equal_those_of_ddp, options)


def test_compression_rounds_to_its_dtype(pair: RankPool, four: RankPool) -> None:
    pair(checks.compression_rounds_to_its_dtype)
    four(checks.compression_rounds_to_its_dtype)


@pytest.mark.parametrize("options", CASES[1:], ids=_name)
def test_an_exchange_frees_the_old_ddp(pair: RankPool, options: ReducerOptions) -> None:
    pair(checks.an_exchange_frees_the_old_ddp, options)


def test_an_option_set_and_taken_back_keeps_the_ddp(pair: RankPool) -> None:
    pair(checks.an_option_set_and_taken_back_keeps_the_ddp)


def test_a_step_alone_leaves_the_gradients_of_this_rank(pair: RankPool) -> None:
    pair(checks.a_step_alone_leaves_the_gradients_of_this_rank)


def test_strides_that_change_keep_the_options(pair: RankPool) -> None:
    pair(checks.strides_that_change_keep_the_options)


@pytest.mark.parametrize("options", CASES, ids=_name)
def test_a_failure_is_recovered(pair: RankPool, options: ReducerOptions) -> None:
    for place, at in itertools.product(("forward", "backward"), (1, 2, 5)):
        pair(checks.a_failure_is_recovered, options, place, at % 2, at, "always" if at < 5 else "")


@pytest.mark.parametrize("options", CASES, ids=_name)
def test_an_error_ends_the_step_on_all(pair: RankPool, options: ReducerOptions) -> None:
    for place, at in itertools.product(("forward", "backward"), (1, 2, 4)):
        pair(checks.an_error_ends_the_step_on_all, options, place, at, "" if at == 2 else "always")


@pytest.mark.parametrize("options", CASES[-1:], ids=_name)
@pytest.mark.parametrize("at", [1, 4])
def test_an_error_of_one_ends_the_step_on_four(four: RankPool, options: ReducerOptions, at: int) -> None:
    four(checks.an_error_ends_the_step_on_all, options, "backward", at, "always")


@pytest.mark.parametrize("unused", ["later", "at first"])
@pytest.mark.parametrize("options", [each for each in CASES if each.static_graph and not each.is_compressed], ids=_name)
def test_a_graph_that_changes_is_static_no_more(pair: RankPool, options: ReducerOptions, unused: str) -> None:
    pair(checks.a_graph_that_changes_is_static_no_more, options, unused)


@pytest.mark.parametrize("options", CASES, ids=_name)
def test_collectives_of_the_model_do_not_count(pair: RankPool, options: ReducerOptions) -> None:
    pair(checks.collectives_of_the_model_do_not_count, options)

"""Agreement of ranks: values, failures at any place, and lost ranks."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from flatout.distributed import exchange
from flatout.distributed.agreement import ALONE, GroupAgreement, RankFailure, RankOutOfMemory
from flatout.distributed.process_group import control_group
from tests.ranks import RankPool, on_ranks


@pytest.fixture(scope="module", params=[2, 3])
def pool(request, tmp_path_factory):
    with RankPool(request.param, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


TEXT = "rank 1: ValueError: no such size"


def ranks() -> GroupAgreement:
    return GroupAgreement(control_group())


@on_ranks("pool")
def test_values_are_those_of_all() -> None:
    assert_values_are_those_of_all(ranks())


@on_ranks("pool")
def test_ranks_of_several_machines_agree() -> None:
    """Simulate ranks on several machines: the last rank cannot reach the socket of rank 0."""
    assert isinstance(ranks()._rows, exchange.LocalExchange)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(exchange, "_reaches", lambda *_: False)
        agreed = ranks()
    assert isinstance(agreed._rows, exchange.GlooExchange)
    assert_values_are_those_of_all(agreed)


def assert_values_are_those_of_all(agreed: GroupAgreement) -> None:
    rank, size = agreed.rank, agreed.size
    assert agreed.largest([float(rank), -float(rank), math.inf if rank else 0.0]) == [size - 1, 0, math.inf]
    many = [float(place if place % size == rank else -1) for place in range(40)]
    assert agreed.largest(many) == list(range(40))
    assert agreed.largest([]) == []
    assert agreed.smallest([0.5, float(rank)]) == [0.5, 0]
    assert agreed.first(float(rank)) == 0.0
    assert agreed.first({"rank": rank}) == {"rank": 0}
    assert agreed.every(str(rank)) == [str(each) for each in range(size)]
    assert len(set(agreed.every(agreed.now()))) == 1
    assert agreed.smallest([float(rank), -float(rank)]) == [0, 1 - size]
    assert agreed.all_hold(True)
    assert not agreed.all_hold(rank != 1)
    assert math.isnan(agreed.largest([1.0, math.nan if rank == 1 else 2.0])[1])


def failure_of(program: Callable[[], None]) -> RankFailure:
    """Return the failure of a program, which must fail together with the other ranks."""
    with pytest.raises(RankFailure) as caught:
        program()
    return caught.value


@on_ranks("pool")
def test_a_failure_stops_all_ranks() -> None:
    agreed = ranks()

    def program() -> None:
        with agreed.attempt():
            agreed.now()
            if agreed.rank == 1:
                raise ValueError("no such size")
            agreed.first("never here")
            raise AssertionError("the others must not pass this point")

    failure = failure_of(program)
    assert str(failure) == TEXT
    assert isinstance(failure.__cause__, ValueError) is (agreed.rank == 1)
    assert sum(agreed.every(1)) == agreed.size


@on_ranks("pool")
def test_the_same_error_of_all_ranks_stays() -> None:
    agreed = ranks()
    with pytest.raises(KeyError), agreed.attempt():
        raise KeyError(agreed.rank)
    with pytest.raises(RankFailure), agreed.attempt():  # the errors have two types
        raise (KeyError if agreed.rank else ValueError)("x")


@on_ranks("pool")
def test_an_outer_failure_passes_inner_handlers() -> None:
    agreed = ranks()

    def fails_outside() -> None:
        with agreed.attempt():
            if agreed.rank == 1:
                raise ValueError("no such size")
            with contextlib.suppress(Exception), agreed.attempt():
                agreed.now()
            raise AssertionError("the failure is of the outer attempt")

    assert str(failure_of(fails_outside)) == TEXT
    with agreed.attempt():
        with contextlib.suppress(RankFailure), agreed.attempt():
            if agreed.rank == 1:
                raise ValueError("no such size")
        assert sum(agreed.every(1)) == agreed.size


@on_ranks("pool")
def test_inner_and_outer_failures_end_in_the_outer_attempt() -> None:
    agreed = ranks()

    def program() -> None:
        with agreed.attempt():
            if agreed.rank == 0:
                raise TypeError("outer")
            with contextlib.suppress(Exception), agreed.attempt():
                raise ValueError("inner")
            raise AssertionError("the failure is of the outer attempt")

    assert str(failure_of(program)) == "rank 0: TypeError: outer"


@on_ranks("pool")
def test_a_failure_before_a_call_stops_the_ranks_that_make_it() -> None:
    agreed = ranks()

    def program() -> None:
        with agreed.attempt("run.fit"):
            if agreed.rank == 1:
                raise ValueError("no such size")
            with agreed.attempt("run.step"):
                pass

    assert str(failure_of(program)) == TEXT


@on_ranks("pool")
def test_out_of_memory_is_told_apart() -> None:
    agreed = ranks()

    def on_rank_1(others: Callable[[], None]) -> None:
        with agreed.attempt():
            if agreed.rank == 1:
                raise torch.OutOfMemoryError("too large")
            others()

    def fails() -> None:
        raise ValueError("another")

    assert isinstance(failure_of(lambda: on_rank_1(agreed.check)), RankOutOfMemory)
    assert not isinstance(failure_of(lambda: on_rank_1(fails)), torch.OutOfMemoryError)


def any_program_ends_alike(seed: int) -> None:
    """Run a random program of nested attempts with failures on random ranks. All ranks must take the same path."""
    agreed = ranks()
    path: list[int] = []
    program, own = random.Random(seed), random.Random(seed * 1000 + agreed.rank)

    def block(depth: int) -> None:
        for _ in range(program.randrange(1, 5)):
            state = program.getstate()
            kind = program.randrange(4)
            if kind == 0:
                path.append(int(agreed.first(float(program.randrange(100)))))
            elif kind == 1 and own.random() < 0.3:
                raise ValueError(f"on rank {agreed.rank}")
            elif kind == 2 and depth < 4:
                try:
                    with agreed.attempt():
                        block(depth + 1)
                    path.append(-depth)
                except Exception:
                    program.setstate(state)  # ranks failed at different places
                    program.random()
                    path.append(-100 - depth)

    with contextlib.suppress(RankFailure, ValueError), agreed.attempt():
        block(1)
    assert len(set(map(tuple, agreed.every(path)))) == 1


@on_ranks("pool")
def test_groups_do_not_mix() -> None:
    agreed = ranks()
    value = torch.full((5,), float(dist.get_rank()))
    work = dist.all_reduce(value, async_op=True)
    assert sum(agreed.every(1)) == agreed.size
    work.wait()
    assert value.tolist() == [sum(range(agreed.size))] * 5


def test_any_program_of_attempts_takes_one_path(pool):
    for seed in range(60):
        pool(any_program_ends_alike, seed)


def test_alone_agrees_with_itself():
    assert ALONE.largest([1.0, 2.0]) == ALONE.smallest([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.first("value") == "value"
    assert ALONE.every("value") == ["value"]
    before = time.perf_counter()
    assert before <= ALONE.now() <= time.perf_counter()
    ALONE.check()
    with pytest.raises(KeyError), ALONE.attempt():
        raise KeyError("own")

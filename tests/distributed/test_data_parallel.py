"""Data-parallel training: equal to one process, on all ranks, also after failures on one of them."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

import flatout
from flatout.tuning.ranks import parallel_of
from tests.distributed import data_parallel_checks as checks

RUNS = 10
"""Random runs without ``--jobs``."""


def test_ddp_requires_several_ranks_and_a_training():
    with pytest.raises(ValueError, match="one process per device"):
        parallel_of("ddp", [nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="requires a training"):
        parallel_of("ddp", [nn.Linear(2, 2)], trains=False)
    with pytest.raises(ValueError, match="parallel must be one of"):
        flatout.optimize(nn.Linear(2, 2), [], parallel="fsdp")


@pytest.mark.parametrize("unused", ["", "always"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 3])  # eight batches an epoch: the last two are an update
@pytest.mark.parametrize("kind", ["sgd", "adamw", "flatout"])
def test_training_equals_that_of_one_process(pool, kind, accumulate, max_norm, unused):
    pool(checks.trains_as_one_process, kind, accumulate, max_norm, unused, None)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_micro_batches_equal_whole_batches(pool, accumulate):
    pool(checks.trains_as_one_process, "adamw", accumulate, 0.05, "", 2)


def test_object_and_keys_are_kept(pair):
    pair(checks.object_and_keys_are_kept)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_own_loop_equals_ddp(pool, accumulate):
    pool(checks.own_loop_equals_ddp, accumulate)


@pytest.mark.parametrize("techniques", [{}, {"fused_optimizer": True}, {"gradient_buckets": True}], ids=str)
def test_channels_last_is_kept(pair, techniques):
    pair(checks.channels_last_is_kept, **techniques)


@pytest.mark.parametrize("unused", ["always", "later", "on rank 1"])
def test_parameters_may_be_left_out(pool, unused):
    pool(checks.parameters_may_be_left_out, unused)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_buffers_stay_equal(pair, accumulate):
    pair(checks.buffers_stay_equal, accumulate)


def test_gradients_without_an_update_add_up(pool):
    pool(checks.gradients_without_an_update_add_up)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("unused", ["", "always"])
def test_out_of_memory_is_recovered(pair, unused, accumulate):
    for place, rank, at in itertools.product(("forward", "backward"), (0, 1), (1, 2, 6)):
        pair(checks.out_of_memory_is_recovered, place, rank, at, unused, accumulate)


def test_out_of_memory_at_random_places_is_recovered(pair, request):
    first, runs = request.config.getoption("--seed"), request.config.getoption("--jobs") or RUNS
    for seed in range(first, first + runs):
        pair(checks.out_of_memory_at_a_random_place_is_recovered, seed)


def test_out_of_memory_on_one_of_four(pool):
    pool(checks.out_of_memory_is_recovered, "backward", 1, 2, "", 1)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "flatout"])
def test_out_of_memory_in_the_update_is_recovered(pair, kind):
    for rank, at in itertools.product((0, 1), (1, 4)):
        pair(checks.out_of_memory_in_the_update_is_recovered, kind, rank, at)


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_before_the_average_is_recovered(pair, rank):
    for at in (1, 4):
        pair(checks.out_of_memory_before_the_average_is_recovered, rank, at)


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_of_one_rank_ends_the_step_on_all(pool, place, at):
    pool(checks.an_error_of_one_rank_ends_the_step_on_all, place, at)


@pytest.mark.parametrize("are_near", [True, False])
def test_messages_of_settled_steps_are_early(pool, are_near):
    pool(checks.messages_of_settled_steps_are_early, are_near)


def test_the_graph_is_freed_before_zeros_take_memory(pool):
    pool(checks.the_graph_is_freed_before_zeros_take_memory)


def test_an_error_after_the_message_is_out_of_step(pool):
    pool(checks.an_error_after_the_message_is_out_of_step)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 3), (3, 4), (3, 8)])
def test_a_training_resumes_bit_for_bit(pool, tmp_path, accumulate, steps):
    pool(checks.a_training_resumes_bit_for_bit, str(tmp_path), accumulate, steps)


def test_a_state_of_another_training_is_refused_by_all(pair, tmp_path):
    pair(checks.a_state_of_another_training_is_refused_by_all, str(tmp_path))


def test_ranks_must_save_together(pair, tmp_path):
    pair(checks.ranks_must_save_together, str(tmp_path))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_saves_on_all(pair, tmp_path, rank):
    pair(checks.a_signal_to_one_rank_saves_on_all, str(tmp_path), rank)


@pytest.mark.parametrize("loss", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("samples", [72, 65, 61])  # batches of 12: the last one has 12, 5 samples, or 1
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_is_sliced(pool, samples, shuffle, loss):
    pool(checks.a_loader_is_sliced, samples, shuffle, loss)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_rank_knows_the_times_of_all(pool, accumulate):
    pool(checks.every_rank_knows_the_times_of_all, accumulate)


def test_the_report_has_the_times_of_all_ranks(pool):
    pool(checks.the_report_has_the_times_of_all_ranks)


def test_the_rate_is_that_of_all_ranks(pool):
    pool(checks.the_rate_is_that_of_all_ranks)

"""DTensors of four ranks: each process steps its parts, and the check of gradients covers all parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs a torch with torch.distributed and gloo", allow_module_level=True)

from tests.optim import dtensor_checks as checks
from tests.optim import dtensor_gradients as gradients
from tests.optim.rules import IN_TORCH, NAMES

PLACES = list(checks.PLACEMENTS)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with RankPool(checks.WORLD, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_plain_tensors(ranks, name, place):
    ranks(checks.steps_are_those_of_plain_tensors, name, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", IN_TORCH)
def test_states_are_torchs(ranks, name, place):
    ranks(checks.states_are_torchs, name, place)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_fuse_and_unfuse_in_the_middle_of_a_run(ranks, name):
    ranks(checks.fused_and_back, name, "hybrid")


@pytest.mark.parametrize(
    "check",
    [
        checks.memory_may_be_replaced,
        checks.autograd_hears_of_it,
        checks.norms_are_of_all_parts_once,
        checks.plain_tensors_beside_count_once,
        checks.torchs_scaler_agrees,
        checks.random_bits_are_of_the_part,
        checks.averages_are_swapped_and_copied,
        checks.saved_and_loaded,
        checks.masters_follow_what_is_written,
        checks.a_nan_is_in_every_norm,
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("place", PLACES)
def test_that(ranks, check, place):
    ranks(check, place)


@pytest.mark.parametrize("form", ["lazy", "eager"])
@pytest.mark.parametrize("place", PLACES)
def test_one_infinity_stops_all_ranks(ranks, place, form):
    ranks(checks.one_infinity_stops_all_ranks, place, form)


def test_other_gradients_are_torchs(ranks):
    ranks(checks.other_gradients_are_torchs)


@pytest.mark.parametrize("place", PLACES)
def test_plain_steps_leave_unscaled_gradients(ranks, place):
    ranks(gradients.plain_steps_leave_unscaled_gradients, place)


def test_partial_gradients_are_unscaled(ranks):
    ranks(gradients.partial_gradients_are_unscaled)


def test_partial_gradients_are_summed_once(ranks):
    ranks(checks.partial_gradients_are_summed_once)


def test_state_of_other_placements_is_spread_anew(ranks):
    ranks(checks.state_of_other_placements_is_spread_anew)


def test_ranks_outside_a_mesh_have_nothing_to_say(ranks):
    ranks(checks.ranks_outside_a_mesh_have_nothing_to_say)


@pytest.mark.parametrize(
    "additions", [{}, {"ema_decay": 0.9, "moment_dtype": torch.bfloat16, "low_precision_copy": torch.bfloat16}], ids=str
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["FSDP", "HSDP"])
def test_a_sharded_model_trains_as_a_plain_one(ranks, shape, additions):
    ranks(checks.a_sharded_model_trains_as_a_plain_one, shape, additions)


def test_tensor_parallel_with_sequences(ranks):
    ranks(checks.tensor_parallel_with_sequences)

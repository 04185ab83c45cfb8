"""Techniques of the reducer: refusals and candidates, without other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from flatout.distributed.agreement import Agreement
from flatout.distributed.gradient_sync import ReducerOptions
from flatout.techniques.base import NothingBetter
from flatout.training.job import Job
from tests.jobs import job_of
from tests.techniques.harness import TECHNIQUES, candidates, refusal

NAMES = ("static_graph", "gradient_buckets", "gradient_compression")


class Ranks(Agreement):
    """Agreement of ranks that need not exist."""

    def __init__(self, size: int) -> None:
        self.size = size


class Wide(nn.Module):
    """Model with gradients of a given number of MiB that take no memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size << 18, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def job(model: nn.Module | None = None, ranks: int = 2, **settings: Any) -> Job:
    model = nn.Linear(2, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return job_of(model, (), optimizer, loss_fn=mse_loss, ranks=Ranks(ranks), **settings)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_has_nothing_to_average(name: str) -> None:
    assert refusal(name, job(ranks=1)) == {"one-process"}
    assert refusal(name, job()) is None


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_averaged_after_parts_and_accumulated_batches(name: str) -> None:
    assert refusal(name, job(accumulate=2)) == {"averaged-after-backward"}
    in_parts = job()
    in_parts.stepper.micro_batches.size = 1
    assert refusal(name, in_parts) == {"averaged-after-backward"}
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    given = job_of(model, (), torch.optim.SGD(model[0].parameters(), lr=0.1), loss_fn=mse_loss, ranks=Ranks(2))
    assert refusal(name, given) == {"averaged-after-backward"}


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_of_the_users_own_is_left_alone(name: str) -> None:
    own = job_of(nn.Linear(2, 2), ranks=Ranks(2))
    assert "no-optimizer" in (refusal(name, own) or ())


@pytest.mark.parametrize("name", NAMES)
def test_ranks_may_train_apart(name: str) -> None:
    apart = job()
    apart.data.batches = [torch.ones(1, 2)]
    assert refusal(name, apart) == {"forbidden"}


def test_only_float32_is_compressed() -> None:
    assert refusal("gradient_compression", job(nn.Linear(2, 2).bfloat16())) == {"not-float32"}


@pytest.mark.parametrize(("size", "tried"), [(1, [25]), (24, [25, 5]), (60, [25, 100, 5]), (200, [25, 100, 5])])
def test_sizes_that_lead_to_the_same_buckets_are_tried_once(size: int, tried: list[int]) -> None:
    assert [candidate.value for candidate in candidates("gradient_buckets", job(Wide(size)))] == tried


@pytest.mark.parametrize(("size", "tried"), [(24, [5]), (60, [100, 5])])
def test_present_buckets_are_not_tried(size: int, tried: list[int]) -> None:
    present = job(Wide(size))
    present.stepper.sync = cast(Any, SimpleNamespace(options=ReducerOptions(bucket_bytes=25 << 20)))
    assert [candidate.value for candidate in candidates("gradient_buckets", present)] == tried


def test_one_bucket_cannot_be_better() -> None:
    small = job(Wide(1))
    small.stepper.sync = cast(Any, SimpleNamespace(options=ReducerOptions(bucket_bytes=25 << 20)))
    with pytest.raises(NothingBetter):
        candidates("gradient_buckets", small)


def test_the_order_of_a_sum_of_two_is_no_matter() -> None:
    effects = [[TECHNIQUES[name].effect_on(job(ranks=ranks)) for name in NAMES] for ranks in (2, 3)]
    assert effects == [["exact", "exact", "rounding"], ["rounding"] * 3]

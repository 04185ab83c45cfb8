"""Equal decisions of all ranks about worker processes and TorchScript, whose warm-ups differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import RankPool
from tests.tuning import worker_checks as checks


@pytest.mark.slow
def test_workers_are_measured_by_all_ranks(pair: RankPool) -> None:
    pair(checks.workers_are_measured_by_all_ranks)


def test_workers_are_those_that_rank_0_has_found(pair: RankPool) -> None:
    pair(checks.workers_are_those_that_rank_0_has_found)


@pytest.mark.parametrize("settings", [1, {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}])
def test_requested_workers_load_the_same_batches(pair: RankPool, settings: Any) -> None:
    pair(checks.requested_workers_load_the_same_batches, settings)


@pytest.mark.parametrize("value", [True, "script", "trace"])
def test_requested_torchscript_trains_as_the_plain_model(pair: RankPool, value: Any) -> None:
    pair(checks.requested_torchscript_trains_as_the_plain_model, value)


def test_torchscript_that_fails_on_one_rank_is_refused_by_all(pair: RankPool) -> None:
    pair(checks.torchscript_that_fails_on_one_rank_is_refused_by_all)

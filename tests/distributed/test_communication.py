"""Techniques of the reducer on several ranks: trials decide by the exposed communication, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import communication_checks as checks
from tests.distributed import data_parallel_checks
from tests.ranks import RankPool

FORCED: dict[str, Any] = {"static_graph": True, "gradient_buckets": 1, "gradient_compression": "bf16"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(2, Path(tmp_path_factory.mktemp("ranks")))
    yield pool
    pool.close()


def test_hidden_communication_costs_no_trial(pool: RankPool) -> None:
    pool(checks.hidden_communication_costs_no_trial)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("static_graph", "static_graph"),
        ("gradient_buckets", "gradient_as_bucket_view"),
        ("gradient_compression", "compression"),
    ],
)
def test_exposed_communication_is_reported_and_saved(pool: RankPool, name: str, changed: str) -> None:
    pool(checks.exposed_communication_is_reported_and_saved, name, changed)


def test_timed_steps_have_their_full_speed(pool: RankPool) -> None:
    pool(checks.timed_steps_have_their_full_speed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_compression_is_caught(pool: RankPool, rank: int) -> None:
    pool(checks.a_wrong_compression_is_caught, rank)


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_technique_is_kept(pool: RankPool, name: str) -> None:
    pool(checks.a_forced_technique_is_kept, {name: FORCED[name]}, "always" if name == "static_graph" else "")


def test_all_techniques_work_together(pool: RankPool) -> None:
    pool(checks.a_forced_technique_is_kept, FORCED, "always")


@pytest.mark.parametrize(
    ("techniques", "arguments", "code"),
    [
        ({"static_graph": True}, {}, "nothing-unused"),
        ({"gradient_buckets": 25}, {"accumulate": 2}, "averaged-after-backward"),
        ({"gradient_buckets": 25, "data_parallel": False}, {}, "forbidden"),
    ],
)
def test_a_forced_technique_is_refused(
    pool: RankPool, techniques: dict[str, Any], arguments: dict[str, Any], code: str
) -> None:
    pool(checks.a_forced_technique_is_refused, techniques, arguments, code)


def test_a_training_with_kept_options_resumes_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    techniques = {"gradient_buckets": 1, "gradient_compression": True}
    pool(data_parallel_checks.a_training_resumes_bit_for_bit, str(tmp_path), 1, 3, techniques)

"""Techniques of the reducer on several ranks: trials decide by the exposed communication, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import communication_checks as checks
from tests.distributed import data_parallel_checks
from tests.ranks import RankPool

FORCED: dict[str, Any] = {"static_graph": True, "gradient_buckets": 1, "gradient_compression": "bf16"}


def test_hidden_communication_costs_no_trial(pair: RankPool) -> None:
    pair(checks.hidden_communication_costs_no_trial)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("static_graph", "static_graph"),
        ("gradient_buckets", "bucket_bytes"),
        ("gradient_compression", "is_compressed"),
    ],
)
def test_exposed_communication_is_reported_and_saved(pair: RankPool, name: str, changed: str) -> None:
    pair(checks.exposed_communication_is_reported_and_saved, name, changed)


def test_timed_steps_have_their_full_speed(pair: RankPool) -> None:
    pair(checks.timed_steps_have_their_full_speed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_compression_is_caught(pair: RankPool, rank: int) -> None:
    pair(checks.a_wrong_compression_is_caught, rank)


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_technique_is_kept(pair: RankPool, name: str) -> None:
    pair(checks.a_forced_technique_is_kept, {name: FORCED[name]}, "always" if name == "static_graph" else "")


def test_all_techniques_work_together(pair: RankPool) -> None:
    pair(checks.a_forced_technique_is_kept, FORCED, "always")


@pytest.mark.parametrize(
    ("techniques", "arguments", "code"),
    [
        ({"static_graph": True}, {}, "nothing-unused"),
        ({"gradient_buckets": 25}, {"accumulate": 2}, "averaged-after-backward"),
        ({"gradient_buckets": 25, "data_parallel": False}, {}, "forbidden"),
    ],
)
def test_a_forced_technique_is_refused(
    pair: RankPool, techniques: dict[str, Any], arguments: dict[str, Any], code: str
) -> None:
    pair(checks.a_forced_technique_is_refused, techniques, arguments, code)


def test_a_training_with_kept_options_resumes_bit_for_bit(pair: RankPool, tmp_path: Path) -> None:
    techniques = {"gradient_buckets": 1, "gradient_compression": True}
    pair(data_parallel_checks.a_training_resumes_bit_for_bit, str(tmp_path), 1, 3, techniques)

"""Store of cached plans: loaded plans, untrusted files, number of kept plans, and concurrent processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flatout.plan import Plan
from flatout.tuning import plan_cache
from flatout.tuning.plan_cache import read_plan, write_plan
from tests.helpers import special_file

PLAN = Plan(
    {"precision": "bf16", "workers": {"num_workers": 2}},
    {"device": "cpu"},
    noise=0.02,
    load_average=1.5,
    cores=2,
    undecided=["compile"],
)
KEY = {"torch": "2.14", "model": "Net"}


def keys(count: int) -> list[Mapping[str, str]]:
    return [KEY | {"number": str(i)} for i in range(count)]


def the_file(plans: Path) -> Path:
    """Return the only file of the store."""
    (path,) = plans.iterdir()
    return path


def test_a_plan_comes_back_for_its_key_alone(plans: Path) -> None:
    assert read_plan(KEY) is None
    write_plan(KEY, PLAN)
    found = read_plan(KEY)
    assert found is not None
    assert found.to_dict() == PLAN.to_dict()
    assert read_plan(KEY | {"torch": "2.15"}) is None
    write_plan(KEY, Plan({}, {}))
    assert read_plan(KEY) == Plan({}, {})


def test_the_file_is_a_plan_and_shows_the_fields_of_the_key(plans: Path) -> None:
    write_plan(KEY, PLAN)
    assert Plan.load(the_file(plans)) == PLAN
    assert json.loads(the_file(plans).read_text())["key"] == KEY


def test_only_this_user_may_open_the_folders(plans: Path) -> None:
    write_plan(KEY, PLAN)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (plans, plans.parent)] == [0o700, 0o700]


def test_off_keeps_nothing(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(KEY, PLAN)
    monkeypatch.setenv("FLATOUT_CACHE", "off")
    assert read_plan(KEY) is None
    write_plan(KEY, PLAN)
    assert len(list(plans.iterdir())) == 1


def test_a_decision_that_is_no_data_is_not_kept(plans: Path) -> None:
    context = multiprocessing.get_context("spawn")
    write_plan(KEY, Plan({"workers": {"num_workers": 1, "multiprocessing_context": context}}, {}))
    assert read_plan(KEY) is None
    assert not plans.exists()


CORRUPT: dict[str, Any] = {
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "another key": {"key": {"torch": "2.0"}},
    "no key": {"key": None},
    "a technique that does not exist": {"decisions": {"warp_drive": True}},
    "a value that no technique has": {"decisions": {"precision": "fp8"}},
    "code": {"decisions": {"workers": "__import__('os').abort()"}},
    "no decisions": {"decisions": None},
    "an impossible load": {"load_average": -1},
    "an impossible number of cores": {"cores": 0},
    "noise that is no number": {"noise": "2 %"},
    "undecided techniques that are no names": {"undecided": [1]},
}


@pytest.mark.parametrize("change", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_ignored_and_replaced(plans: Path, change: Any) -> None:
    write_plan(KEY, PLAN)
    path = the_file(plans)
    content = change if isinstance(change, bytes) else json.dumps(json.loads(path.read_text()) | change).encode()
    path.write_bytes(content)
    assert read_plan(KEY) is None
    write_plan(KEY, PLAN)
    assert read_plan(KEY) == PLAN


def test_a_truncated_file_is_ignored(plans: Path) -> None:
    write_plan(KEY, PLAN)
    content = the_file(plans).read_bytes().rstrip()
    for size in range(len(content)):
        the_file(plans).write_bytes(content[:size])
        assert read_plan(KEY) is None


def test_a_link_in_the_place_of_a_plan_is_not_followed(plans: Path, tmp_path: Path) -> None:
    write_plan(KEY, PLAN)
    path = the_file(plans).rename(tmp_path / "elsewhere.json")
    (plans / the_name(KEY)).symlink_to(path)
    assert read_plan(KEY) is None


def the_name(key: Mapping[str, str]) -> str:
    path = plan_cache._path(key)
    assert path is not None
    return path.name


def test_a_linked_folder_of_this_user_serves(plans: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    plans.parent.mkdir()
    plans.symlink_to(tmp_path / "disk")
    write_plan(KEY, PLAN)
    assert read_plan(KEY) == PLAN


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(plans: Path, mode: int) -> None:
    write_plan(KEY, PLAN)
    plans.chmod(mode)
    assert read_plan(KEY) is None
    write_plan(KEY | {"torch": "2.15"}, PLAN)
    assert len(list(plans.iterdir())) == 1


def test_a_folder_of_another_user_is_not_used(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(KEY, PLAN)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_plan(KEY) is None
    write_plan(KEY | {"torch": "2.15"}, PLAN)
    assert len(list(plans.iterdir())) == 1


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_something_else_in_the_place_of_the_folder_is_left_alone(plans: Path, kind: str) -> None:
    plans.parent.mkdir()
    special_file(plans.parent, kind).rename(plans)
    write_plan(KEY, PLAN)
    assert read_plan(KEY) is None
    assert not plans.is_dir()


@pytest.mark.parametrize("folder", ["/proc/flatout", "/dev/null/flatout"])
def test_a_folder_that_cannot_be_written_is_no_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", folder)
    write_plan(KEY, PLAN)
    assert read_plan(KEY) is None


def test_the_plans_that_were_not_used_for_longest_are_deleted(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    *old, new = keys(4)
    for age, key in enumerate(old):
        write_plan(key, PLAN)
        os.utime(plans / the_name(key), (1000 + age, 1000 + age))
    assert read_plan(old[0]) == PLAN  # just used
    write_plan(new, PLAN)
    assert [read_plan(key) is not None for key in (*old, new)] == [True, False, True, True]


def test_large_plans_are_limited_by_their_bytes(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(KEY, PLAN)
    monkeypatch.setattr(plan_cache, "MOST_BYTES", 2 * the_file(plans).stat().st_size + 100)
    for key in keys(5):
        write_plan(key, PLAN)
    assert 1 <= len(list(plans.iterdir())) <= 2
    assert read_plan(keys(5)[-1]) == PLAN


def test_only_the_stores_own_files_are_deleted(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 1)
    write_plan(KEY, PLAN)
    left_by_a_kill = plans / f".{the_name(KEY)}.abcdefgh"
    for path in (left_by_a_kill, plans / "house.json", plans / "0123.json"):
        path.touch()
        os.utime(path, (1000, 1000))
    write_plan(KEY, PLAN)
    assert {path.name for path in plans.iterdir()} == {the_name(KEY), "house.json", "0123.json"}


def use_often(seed: int) -> int:
    """Write and read plans of a few keys, and return how many came back."""
    found = 0
    for i in range(60):
        key = keys(5)[(seed + i) % 5]
        write_plan(key, Plan(PLAN.decisions, {"by": str(seed)}))
        plan = read_plan(key)
        if plan is not None:
            assert plan.decisions == PLAN.decisions
            found += 1
    return found


def test_many_processes_may_write_at_once(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    with ProcessPoolExecutor(6, mp_context=multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(use_often, range(6)))
    assert sum(found) > 0
    write_plan(KEY, PLAN)
    names = [path.name for path in plans.iterdir()]
    assert len(names) <= 3
    assert not any(name.startswith(".") for name in names)

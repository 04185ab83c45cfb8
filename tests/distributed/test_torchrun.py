"""Process groups in processes of torchrun and of launchers without an agent."""

from __future__ import annotations

import pytest
import torch

from flatout.distributed import process_group
from tests.distributed.launch import IMPORTS, JOIN, alone, plainly, torchrun

pytestmark = pytest.mark.slow

SUM = """
total = torch.ones(1)
dist.all_reduce(total)
tell(f"sum {int(total)} joined {process_group.is_joined()}")
"""


def test_a_script_without_a_launcher_has_no_process_group() -> None:
    ended = alone(JOIN + "tell(str(dist.is_initialized()))")
    assert (ended.status, ended.out, ended.err) == ([0], ["False"], "")


@pytest.mark.parametrize("launch", [torchrun, plainly])
def test_a_group_is_made_and_ends_with_the_process(launch) -> None:
    ended = launch(JOIN + SUM)
    assert set(ended.status) == {0}
    assert ended.out == ["sum 2 joined True"] * 2
    assert ended.err == ""


def test_a_rank_may_end_long_after_the_rank_that_keeps_the_store() -> None:
    ended = plainly(JOIN + SUM + "if dist.get_rank(): time.sleep(3)\n")
    assert (ended.status, ended.err) == ([0, 0], "")


@pytest.mark.parametrize("launch", [torchrun, plainly])
def test_a_scripts_own_group_survives(launch) -> None:
    own = """
import atexit
atexit.register(lambda: tell(f"last {dist.is_initialized()}"))
dist.init_process_group("gloo")
before = dist.group.WORLD
process_group.join(torch.device("cpu"))
process_group.control_group()
assert dist.group.WORLD is before
"""
    ended = launch(IMPORTS + own + SUM)
    assert set(ended.status) == {0}
    assert sorted(ended.out) == ["last True"] * 2 + ["sum 2 joined False"] * 2
    assert ended.err == ""


@pytest.mark.parametrize("attempt", range(2))
def test_a_restart_makes_a_new_group(attempt: int) -> None:
    dies = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
tell("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"])
process_group.control_group()
"""
    ended = torchrun(JOIN + dies + SUM, options=("--max-restarts=3",))
    assert ended.status == [0]
    assert ended.out.count("attempt 1") == ended.out.count("sum 2 joined True") == 2


@pytest.mark.parametrize(
    ("variables", "devices", "number"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1"}, 4, 1),
        ({"RANK": "5", "LOCAL_RANK": "5"}, 4, 1),
        ({"RANK": "5", "LOCAL_RANK": "3"}, 1, 0),  # torchrun --virtual-local-rank
        ({"RANK": "5"}, 4, 1),  # a launcher without LOCAL_RANK
        ({}, 4, 0),
    ],
)
def test_the_device_of_a_rank(monkeypatch, variables: dict[str, str], devices: int, number: int) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert process_group.local_device() == torch.device("cuda", number)


def test_without_a_gpu_a_rank_is_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process_group.local_device() == torch.device("cpu")

"""Findings of the doctor under torchrun: facts that differ between ranks, and ranks that fail in a check."""

from __future__ import annotations

import json

import pytest

from flatout.cli import doctor, main
from flatout.cli.diagnosis import Finding
from flatout.cli.rank_checks import by_rank, compared, merged
from tests.distributed.launch import torchrun


def row(rank: int, **changes: str) -> dict[str, str]:
    """Return the facts of one of four healthy ranks, on two machines with two GPUs each."""
    versions = {"torch": "1", "flatout": "1", "NCCL": "1"}
    return {"host": f"host{rank // 2}", "device": f"cuda:{rank % 2}", "uuid": f"GPU-{rank}", **versions, **changes}


def wrong(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.verdict) for finding in findings if finding.verdict != "good"]


def test_nothing_is_wrong_with_good_ranks() -> None:
    findings = list(compared([row(rank) for rank in range(4)]))
    assert wrong(findings) == []
    assert [finding.name for finding in findings] == ["ranks", "devices", "torch", "flatout", "NCCL"]
    assert findings[0].found.splitlines()[1:] == ["rank 0, 1: host0", "rank 2, 3: host1"]


WRONG = {
    # defect: (changes of rank 1, findings)
    "another torch": ({"torch": "2"}, [("torch", "broken")]),
    "another NCCL": ({"NCCL": "2"}, [("NCCL", "broken")]),
    "a shared GPU": ({"uuid": "GPU-0"}, [("devices", "broken")]),
    "no GPU": ({"device": "cpu", "uuid": ""}, []),
}


@pytest.mark.parametrize(("changes", "expected"), WRONG.values(), ids=WRONG)
def test_each_defect_is_found(changes: dict[str, str], expected: list[tuple[str, str]]) -> None:
    findings = list(compared([row(0), row(1, **changes)]))
    assert wrong(findings) == expected
    assert all(finding.fix for finding in findings if finding.verdict == "broken")


def test_ranks_without_a_gpu_share_no_gpu() -> None:
    assert wrong(list(compared([row(rank, device="cpu", uuid="") for rank in range(2)]))) == []


def test_values_are_grouped_by_rank() -> None:
    assert by_rank(["a", "a"]) == "a"
    assert by_rank(["a", "b", "a"]) == "rank 0, 2: a\nrank 1: b"


def test_findings_of_machines_are_merged() -> None:
    equal, first, second = (
        Finding("GPU", "driver", "1"),
        Finding("memory", "/dev/shm", "8 GiB"),
        Finding("memory", "/dev/shm", "9 MiB", "slow", "enlarge"),
    )
    only = Finding("GPU", "cuda:7 peak", "unknown", "note", "measure")
    assert merged({0: (equal, first), 8: (equal, second, only)}) == [
        equal,
        Finding("memory", "/dev/shm", "rank 0: 8 GiB"),
        Finding("memory", "/dev/shm", "rank 8: 9 MiB", "slow", "enlarge"),
        Finding("GPU", "cuda:7 peak", "rank 8: unknown", "note", "measure"),
    ]
    assert merged({0: (equal, first)}) == [equal, first]


def test_ranks_that_do_not_meet_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RuntimeError("Timed out after 61 seconds\nmore")

    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "examine_ranks", fails)
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(part in err for part in ("node7:29500", "rank 0", "Timed out"))


SCRIPT = """
import os, sys, time
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from torch.utils import collect_env
from flatout.cli import diagnosis, main, rank_checks
if os.environ["RANK"] == "0":
    def slowly():  # so that rank 1 ends before
        time.sleep(4)
        raise OSError("no pip")
    collect_env.get_env_info = slowly
else:
    diagnosis.examine = rank_checks.examine = lambda: 1 / 0  # only one rank of a host examines the host
    if sys.argv[1:] == ["fails"]:
        rank_checks._MESSAGE = -4
sys.exit(main(["doctor", "--json"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("fails",)], ids=["healthy", "fails"])
def test_rank_0_shows_the_findings_of_all_ranks(arguments: tuple[str, ...]) -> None:
    ended = torchrun(SCRIPT, *arguments, limit=180.0)
    record = json.loads("\n".join(ended.out))
    findings = {finding["name"]: finding for finding in record["findings"]}
    assert {"ranks", "torch", "all-reduce", "torch.compile", "/dev/shm"} <= findings.keys()
    assert findings["all-reduce"]["verdict"] == ("broken" if arguments else "good")
    assert ("rank 1" in findings["all-reduce"]["found"]) == bool(arguments)
    assert ended.status == [len(arguments)]

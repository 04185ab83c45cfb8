"""Findings of the doctor under torchrun: facts that differ between ranks, and ranks that fail in a check."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from flatout.cli import doctor, main, rank_facts
from flatout.cli.diagnosis import Finding
from flatout.cli.facts import Facts
from flatout.cli.rank_checks import by_rank, checks, merged
from flatout.cli.rank_facts import Interface
from tests.distributed.launch import plainly, torchrun_module

MEASURED = Facts(latency_ms=0.1, backend="nccl", bandwidth=100.0)


def row(rank: int, **changes: Any) -> dict[str, Any]:
    """Return the facts of one of four healthy ranks, on two machines with two GPUs each."""
    versions = {name: "1" for name in ("Python", "torch", "flatout", "CUDA", "driver", "NCCL")}
    return {
        **versions,
        "host": f"host{rank // 2}",
        "backends": "gloo, nccl",
        "interface": Interface(f"10.0.0.{rank // 2}"),
        "NCCL interface": Interface(f"10.0.0.{rank // 2}"),
        "device": f"cuda:{rank % 2}",
        "device id": f"GPU-{rank}",
        "variables": {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
        **changes,
    }


def examined(*rows: dict[str, Any], skew: float = 0.0, measured: Facts = MEASURED) -> list[Finding]:
    clocks = [1e9 + skew * rank for rank in range(len(rows))]
    return [finding for check in checks(rows, clocks, measured) for finding in check.findings()]


def wrong(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.verdict) for finding in findings if finding.verdict != "good"]


def test_nothing_is_wrong_with_good_ranks() -> None:
    findings = examined(*map(row, range(4)))
    assert wrong(findings) == []
    names = ["ranks", "versions", "backends", "interface", "NCCL interface", "devices", "time-out", "flight recorder"]
    assert [finding.name for finding in findings] == [*names, "variable", "variable", "agreement", "all-reduce"]
    assert findings[0].found.splitlines()[1:] == ["ranks 0–1: host0", "ranks 2–3: host1"]


WRONG = {
    # defect: (changes of rank 1, of rank 0, findings)
    "another torch": ({"torch": "2"}, {}, [("torch", "broken")]),
    "another NCCL": ({"NCCL": "2"}, {}, [("NCCL", "broken")]),
    "another driver": ({"driver": "2"}, {}, [("driver", "note")]),
    "a fact that cannot be read": ({"Python": "could not be looked at: OSError: x"}, {}, [("Python", "note")]),
    "no NCCL": ({"backends": "gloo"}, {}, [("backends", "broken")]),
    "no gloo": ({"backends": "nccl"}, {"backends": "nccl"}, [("backends", "broken")]),
    "no such interface": (
        {"interface": Interface("lo", "GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME=ib7")},
        {},
        [("interface", "broken")],
    ),
    "a local address": ({"interface": Interface("127.0.1.1")}, {"host": "other"}, [("interface", "broken")]),
    "a local address of the only host": ({"interface": Interface("127.0.1.1")}, {}, []),
    "a shared GPU": ({"device id": "GPU-0"}, {}, [("shared device", "broken")]),
    "the CPU": ({"device": "cpu", "device id": ""}, {"device": "cpu", "device id": "", "NCCL": "1"}, []),
    "another variable": (
        {"variables": {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_ALGO": "Ring"}},
        {},
        [("variable", "note")],
    ),
    "no flight recorder": ({"variables": {}}, {"variables": {}}, [("flight recorder", "note")]),
    "a flight recorder that is not written": (
        {"variables": {"TORCH_FR_BUFFER_SIZE": "2000"}},
        {"variables": {"TORCH_FR_BUFFER_SIZE": "2000"}},
        [("flight recorder", "note")],
    ),
    "blocking waits": (
        {"variables": {**row(0)["variables"], "TORCH_NCCL_BLOCKING_WAIT": "1"}},
        {"variables": {**row(0)["variables"], "TORCH_NCCL_BLOCKING_WAIT": "1"}},
        [("variable", "slow")],
    ),
}


@pytest.mark.parametrize(("second", "first", "expected"), WRONG.values(), ids=WRONG)
def test_each_defect_is_found(second: dict[str, Any], first: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    findings = examined(row(0, **first), row(1, **second))
    assert wrong(findings) == expected
    assert all(finding.fix for finding in findings if finding.verdict in ("slow", "broken"))


def test_what_differs_has_a_line_per_value() -> None:
    findings = examined(row(0), row(1, torch="2"), row(2))
    (torch,) = (finding for finding in findings if finding.name == "torch")
    assert torch.found.splitlines() == ["ranks 0, 2: 1", "rank 1: 2"]


@pytest.mark.parametrize(
    ("skew", "measured", "expected"),
    [
        (2.0, MEASURED, [("clocks", "note")]),
        (0.5, MEASURED, []),
        (0.0, Facts(latency_ms=8.0), [("agreement", "slow")]),
        (0.0, Facts(latency_ms=0.1, backend="nccl", error="RuntimeError: {x}"), [("all-reduce", "broken")]),
    ],
)
def test_clocks_and_measurements(skew: float, measured: Facts, expected: list[tuple[str, str]]) -> None:
    assert wrong(examined(row(0), row(1), skew=skew, measured=measured)) == expected


def test_values_are_grouped_by_rank() -> None:
    assert by_rank(["a", "a"]) == "a"
    assert by_rank(["a", "b", "a", "a", "b"]) == "ranks 0, 2–3: a\nranks 1, 4: b"


def test_findings_of_machines_are_merged() -> None:
    equal, first, second = (
        Finding("GPU", "driver", "1"),
        Finding("CPU", "load", "0.1"),
        Finding("CPU", "load", "9", "note", "wait"),
    )
    only = Finding("memory", "swap", "1 GiB", "note", "end other programs")
    assert merged({0: (equal, first), 8: (equal, second, only)}) == [
        equal,
        Finding("CPU", "load", "rank 0: 0.1\nrank 8: 9", "note", "wait"),
        Finding("memory", "swap", "rank 8: 1 GiB", "note", "end other programs"),
    ]
    assert merged({0: (equal, first)}) == [equal, first]


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "lo")
    assert rank_facts.interface(variable) == Interface("lo 127.0.0.1", variable)
    monkeypatch.setenv(variable, "nothing7")
    assert rank_facts.interface(variable).missing == f"{variable}=nothing7"
    monkeypatch.delenv(variable)
    assert not rank_facts.interface(variable).variable


@pytest.mark.parametrize(
    ("setting", "names"),
    [("eth", ["eth0", "eth1"]), ("=eth1", ["eth1"]), ("^lo,eth0", ["eth1", "ib0"]), ("ib,lo", ["lo", "ib0"])],
)
def test_nccl_accepts_prefixes(monkeypatch: pytest.MonkeyPatch, setting: str, names: list[str]) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "eth1", "ib0"])))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", setting)
    found = rank_facts.interface("NCCL_SOCKET_IFNAME").found
    assert [each.split()[0] for each in found.split(", ")] == names


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


@pytest.mark.slow
def test_rank_0_prints_the_findings_of_all_ranks() -> None:
    ended = torchrun_module("flatout", "doctor", "--json", CUDA_VISIBLE_DEVICES="")
    findings = json.loads("\n".join(ended.out))
    assert ended.status == [int(any(finding["verdict"] == "broken" for finding in findings))]
    names = {finding["name"] for finding in findings}
    assert {"ranks", "versions", "agreement", "all-reduce", "torch", "RAM"} <= names
    # One rank per machine measures load and memory.
    assert not any("rank 1" in finding["found"] for finding in findings if finding["topic"] != "ranks")


@pytest.mark.slow
def test_a_rank_that_fails_in_a_check_stops_no_other() -> None:
    script = """
import os, platform, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from flatout.cli import main, rank_facts
if os.environ["RANK"] == "1":
    def fails():
        raise OSError("no version")
    platform.python_version = fails
    rank_facts._MESSAGE = -4
sys.exit(main(["doctor", "--json"]))
"""
    ended = plainly(script)
    findings = {finding["name"]: finding for finding in json.loads("\n".join(ended.out))}
    assert ended.status == [1, 1]
    assert findings["Python"]["found"].splitlines()[1].startswith("rank 1: ")
    assert "no version" in findings["Python"]["found"]
    assert findings["all-reduce"]["verdict"] == "broken"
    assert "rank 1" in findings["all-reduce"]["found"]

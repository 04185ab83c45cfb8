"""Checks of ``flatout doctor`` under ``torchrun``: facts of every rank, compared on all ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from flatout.cli.diagnosis import SEVERITY, Check, Finding, Rule, examine
from flatout.cli.facts import Facts
from flatout.cli.rank_facts import Interface, facts_of_rank, measure
from flatout.core.formatting import counted
from flatout.distributed import process_group
from flatout.distributed.agreement import GroupAgreement

TIMEOUT = timedelta(seconds=60)
"""Time in which all ranks must start, and in which each collective of the default group must end."""

_CLOCK_SKEW = 1.0
"""Difference of the clocks of two ranks, in seconds, above which logs and file times mislead."""

_SLOW_AGREEMENT = 5.0
"""Milliseconds of one agreement above which many short trials are slow."""

_VERSIONS = ("Python", "torch", "flatout", "CUDA", "driver", "NCCL")
_MUST_BE_EQUAL = {"torch", "flatout", "CUDA", "NCCL"}
"""Versions that must be equal on all ranks. Other versions may differ."""


def examine_ranks() -> tuple[Finding, ...]:
    """Examine the machines and the connection of all ranks. All ranks return the same findings.

    Raises:
        RuntimeError: a rank is missing, or the ranks cannot reach each other.
    """
    process_group.join(torch.device("cpu"), TIMEOUT)
    ranks = GroupAgreement(process_group.control_group())
    device = process_group.local_device()
    place = socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")
    places = ranks.every(place)
    # One rank per machine examines the machine, because all ranks of a machine would find the same.
    pages = ranks.every(examine() if places.index(place) == ranks.rank else ())
    rows = ranks.every(facts_of_rank(device))
    ranks.check()  # synchronizes the ranks, so that all clocks are read at the same time
    clocks = ranks.every(time.time())
    measured = measure(ranks, device, is_shared=bool(_shared(row["device id"] for row in rows)))
    found = [finding for check in checks(rows, clocks, measured) for finding in check.findings()]
    return (*found, *merged({rank: page for rank, page in enumerate(pages) if page}))


def _shared(devices: Iterable[str]) -> list[tuple[int, int]]:
    """Return pairs of ranks on the same GPU. The first rank of each pair is the first rank on the GPU."""
    first: dict[str, int] = {}
    pairs = []
    for rank, device in enumerate(devices):
        if device and first.setdefault(device, rank) != rank:
            pairs.append((first[device], rank))
    return pairs


def by_rank(values: Sequence[str]) -> str:
    """Return the value of all ranks, or one line per value with its ranks if the values differ."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return values[0]
    return "\n".join(f"{_named(of)}: {value}" for value, of in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in spans)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def merged(pages: dict[int, tuple[Finding, ...]]) -> list[Finding]:
    """Merge the findings of several machines. A finding that differs has one line per machine.

    Args:
        pages: findings of each machine, by the machine's first rank.
    """
    keys = list(dict.fromkeys((finding.topic, finding.name) for page in pages.values() for finding in page))
    together = []
    for topic, name in keys:
        found = {
            rank: finding
            for rank, page in pages.items()
            for finding in page
            if (finding.topic, finding.name) == (topic, name)
        }
        worst = max(found.values(), key=lambda finding: SEVERITY.index(finding.verdict))
        texts = {rank: finding.found for rank, finding in found.items()}
        same = len(set(texts.values())) == 1 and len(texts) == len(pages)
        text = worst.found if same else "\n".join(f"rank {rank}: {text}" for rank, text in texts.items())
        together.append(Finding(topic, name, text, worst.verdict, worst.fix))
    return together


def checks(rows: Sequence[dict[str, Any]], clocks: Sequence[float], measured: Facts) -> tuple[Check, ...]:
    """Return the checks of all ranks.

    Args:
        rows: facts of each rank, by rank.
        clocks: ``time.time()`` of each rank at the same moment.
        measured: latency in milliseconds, backend, and bandwidth in GB/s or an error.
    """

    def column(name: str) -> list[Any]:
        return [row[name] for row in rows]

    hosts = list(dict.fromkeys(column("host")))
    on_gpu = any(device.startswith("cuda") for device in column("device"))
    versions = [
        Facts(name=name, found=by_rank(column(name)), differ=len(set(column(name))) > 1, must=name in _MUST_BE_EQUAL)
        for name in _VERSIONS
    ]
    equal = ", ".join(f"{each.name} {each.found}" for each in versions if not each.differ and each.found != "none")
    names = sorted({name for row in rows for name in row["variables"]})
    variables = {name: by_rank([row["variables"].get(name, "not set") for row in rows]) for name in names}

    return (
        Check("ranks", "ranks", lambda: [
            Facts(ranks=counted(len(rows), "rank"), hosts=counted(len(hosts), "host"),
                  named=by_rank(column("host")), several=len(hosts) > 1)
        ], (
            Rule("ranks", "{ranks} on {hosts}\n{named}", when=lambda f: f.several),
            Rule("ranks", "{ranks} on {hosts}: {named}"),
        )),
        Check("ranks", "versions", lambda: [Facts(equal=equal), *(each for each in versions if each.differ)], (
            Rule("versions", "{equal}", when=lambda f: f.equal),
            Rule("{name}", "{found}", "broken", "install the same {name} on all hosts", lambda f: f.must),
            Rule("{name}", "{found}", "note", "install the same {name} on all hosts", lambda f: f.differ),
        )),
        Check("ranks", "backends", lambda: [Facts(found=by_rank(column("backends")))], (
            Rule("backends", "{found}", "broken", "install a build of torch with NCCL",
                 lambda f: on_gpu and not all("nccl" in each for each in column("backends"))),
            Rule("backends", "{found}", "broken", "install a build of torch with gloo",
                 lambda f: not all("gloo" in each for each in column("backends"))),
            Rule("backends", "{found}"),
        )),
        _interface_check("interface", column("interface"), hosts),
        *([_interface_check("NCCL interface", column("NCCL interface"), hosts)] if on_gpu else []),
        Check("ranks", "devices", lambda: [Facts(found=by_rank(column("device")))], (
            Rule("devices", "{found}"),
        )),
        Check("ranks", "shared devices", lambda: [
            Facts(first=first, second=second, device=rows[second]["device"])
            for first, second in _shared(column("device id"))
        ], (
            Rule("shared device", "ranks {first} and {second} use the same GPU, {device}", "broken",
                 "torchrun --nproc-per-node=gpu starts one rank per GPU"),
        )),
        Check("ranks", "clocks", lambda: [Facts(skew=max(clocks) - min(clocks))], (
            Rule("clocks", "{skew:.1f} s apart", "note",
                 "synchronize the clocks, for example with chrony: logs and file times mislead",
                 lambda f: f.skew > _CLOCK_SKEW),
        )),
        Check("ranks", "time-outs", lambda: [Facts(minutes=process_group.TIMEOUT.total_seconds() / 60)], (
            Rule("time-out", "{minutes:.0f} min for a collective of flatout's group"),
        )),
        Check("ranks", "flight recorder", lambda: [
            Facts(size=variables.get("TORCH_FR_BUFFER_SIZE") or variables.get("TORCH_NCCL_TRACE_BUFFER_SIZE"),
                  dumps=variables.get("TORCH_NCCL_DUMP_ON_TIMEOUT"))
        ] if on_gpu else [], (
            Rule("flight recorder", "off: a collective that hangs leaves no record", "note",
                 "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 torchrun ...", lambda f: not f.size),
            Rule("flight recorder", "on, but writes nothing at a time-out", "note",
                 "TORCH_NCCL_DUMP_ON_TIMEOUT=1 torchrun ...", lambda f: f.dumps is None),
            Rule("flight recorder", "on"),
        )),
        Check("ranks", "variables", lambda: [
            Facts(name=name, found=text, differ="\n" in text) for name, text in variables.items()
        ], (
            Rule("variable", "{name}\n{found}", "note", "set {name} alike on all ranks", lambda f: f.differ),
            Rule("variable", "{name}={found}: every collective waits on the host", "slow", "unset {name}",
                 lambda f: f.name == "TORCH_NCCL_BLOCKING_WAIT" and f.found != "0"),
            Rule("variable", "{name}={found}", when=lambda f: f.name != "OMP_NUM_THREADS"),  # checked under threads
        )),
        Check("ranks", "speed", lambda: [measured], (
            Rule("agreement", "{latency_ms:.2f} ms", "slow",
                 "a faster network between the hosts, or fewer hosts: each trial takes several agreements",
                 lambda f: f.latency_ms > _SLOW_AGREEMENT),
            Rule("agreement", "{latency_ms:.2f} ms"),
            Rule("all-reduce", "{backend} fails: {error}", "broken",
                 "NCCL_DEBUG=INFO torchrun ... shows the cause", lambda f: f.error),
            Rule("all-reduce", "{bandwidth:.2f} GB/s per rank, {backend}, 16 MiB", when=lambda f: f.bandwidth),
        )),
    )  # fmt: skip


def _interface_check(name: str, column: Sequence[Interface | str], hosts: Sequence[str]) -> Check:
    """Return the check of the interface on which a backend connects the hosts."""
    interfaces = [each if isinstance(each, Interface) else Interface(each) for each in column]
    found = Facts(
        found=by_rank([each.found for each in interfaces]),
        variable=interfaces[0].variable,
        missing=", ".join(sorted({each.missing for each in interfaces} - {""})),
        is_local=len(hosts) > 1 and any(each.found.startswith("127.") for each in interfaces),
    )
    return Check("ranks", name, lambda: [found], (
        Rule(name, "{missing} names no interface. There are: {found}", "broken",
             "ip -br addr lists them: set the variable on each host", lambda f: f.missing),
        Rule(name, "{found}", "broken",
             "GLOO_SOCKET_IFNAME=eth0, with the name of the interface that reaches the other hosts",
             lambda f: f.is_local),
        Rule(name, "{found} ({variable})", when=lambda f: f.variable),
        Rule(name, "{found} (address of the host name)"),
    ))  # fmt: skip

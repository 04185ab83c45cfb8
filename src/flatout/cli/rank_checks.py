"""Checks of all ranks for ``flatout doctor`` under ``torchrun``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import flatout
from flatout.cli.diagnosis import Finding, examine
from flatout.core.formatting import counted, first_line
from flatout.distributed import process_group
from flatout.distributed.agreement import Agreement, GroupAgreement

TIMEOUT = timedelta(seconds=60)
"""Time in which all ranks must start, and in which each collective of the default group must end."""

_MESSAGE = 16 * 2**20
"""Bytes of the measured all-reduce."""

_VERSIONS = ("torch", "flatout", "NCCL")
"""Versions that must be equal on all ranks."""


def examine_ranks() -> tuple[Finding, ...]:
    """Examine the machines and the connection of all ranks. All ranks return the same findings.

    Raises:
        RuntimeError: a rank is missing, or the ranks cannot reach each other.
    """
    process_group.join(torch.device("cpu"), TIMEOUT)
    ranks = GroupAgreement(process_group.control_group())
    device = process_group.local_device()
    place = socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # One rank per host and choice of GPUs examines them, because other ranks would find the same.
    pages = ranks.every(examine() if ranks.every(place).index(place) == ranks.rank else ())
    rows = ranks.every(facts_of_rank(device))
    found = list(compared(rows))
    if not share_a_gpu(rows):  # NCCL refuses two ranks on one GPU
        found.append(all_reduce(ranks, device))
    return (*found, *merged({rank: page for rank, page in enumerate(pages) if page}))


def facts_of_rank(device: torch.device) -> dict[str, str]:
    """Return the host, the device and the versions of this rank."""
    uuid = ""
    if device.type == "cuda":
        with suppress(RuntimeError):  # examine() reports a GPU that fails
            uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {
        "host": socket.gethostname(),
        "device": str(device),
        "uuid": uuid,
        "torch": torch.__version__,
        "flatout": flatout.__version__,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
    }


def compared(rows: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Yield the findings on the facts of all ranks.

    Args:
        rows: results of ``facts_of_rank``, by rank.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    hosts = counted(len(set(columns["host"])), "host")
    yield Finding("ranks", "ranks", f"{counted(len(rows), 'rank')} on {hosts}\n{by_rank(columns['host'])}")
    if share_a_gpu(rows):
        found = f"several ranks use one GPU\n{by_rank(columns['uuid'])}"
        yield Finding("ranks", "devices", found, "broken", "torchrun --nproc-per-node=gpu starts one rank per GPU")
    else:
        yield Finding("ranks", "devices", by_rank(columns["device"]))
    for name in _VERSIONS:
        if len(set(columns[name])) == 1:
            yield Finding("ranks", name, columns[name][0])
        else:
            yield Finding("ranks", name, by_rank(columns[name]), "broken", f"install the same {name} on all hosts")


def share_a_gpu(rows: Sequence[Mapping[str, str]]) -> bool:
    """Return True if two ranks use the same GPU."""
    uuids = [row["uuid"] for row in rows if row["uuid"]]
    return len(set(uuids)) < len(uuids)


def by_rank(values: Sequence[str]) -> str:
    """Return the value of all ranks, or one line per value with its ranks if the values differ."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    if len(ranks) == 1:
        return values[0]
    return "\n".join(f"rank {', '.join(of)}: {value}" for value, of in ranks.items())


def all_reduce(ranks: Agreement, device: torch.device) -> Finding:
    """Return the finding on an all-reduce of all ranks, with the backend that a training uses."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        with ranks.attempt():
            message = torch.zeros(_MESSAGE // 4, device=device)
            ranks.check()  # after a failure on one rank, no rank starts a collective of the other group
            (seconds,) = ranks.largest([_all_reduce_seconds(message, backend)])
    except RuntimeError as error:
        fix = "NCCL_DEBUG=INFO torchrun ... shows the cause"
        return Finding("ranks", "all-reduce", f"{backend} fails: {first_line(error)}", "broken", fix)
    bandwidth = 2 * (ranks.size - 1) / ranks.size * _MESSAGE / seconds / 1e9
    return Finding("ranks", "all-reduce", f"{bandwidth:.2f} GB/s per rank, {backend}, 16 MiB")


def _all_reduce_seconds(message: torch.Tensor, backend: str) -> float:
    """Return the shortest time of an all-reduce, in seconds."""
    group: Any = dist.new_group(backend=backend)
    times = []
    for _ in range(4):  # the first all-reduce connects
        begun = time.perf_counter()
        dist.all_reduce(message, group=group)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        times.append(time.perf_counter() - begun)
    dist.destroy_process_group(group)
    return min(times)


def merged(pages: Mapping[int, Sequence[Finding]]) -> list[Finding]:
    """Merge the findings of several ranks. A finding that differs between them names its rank.

    Args:
        pages: findings by rank.
    """
    found: dict[Finding, None] = {}
    for rank, page in pages.items():
        for finding in page:
            is_equal = all(finding in other for other in pages.values())
            found[finding if is_equal else replace(finding, found=f"rank {rank}: {finding.found}")] = None
    return list(found)

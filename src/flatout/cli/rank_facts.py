"""Facts of one rank, and measurements of all ranks together, for ``flatout doctor`` under ``torchrun``."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import socket
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import flatout
from flatout.cli import facts
from flatout.cli.facts import Facts
from flatout.core.formatting import first_line
from flatout.distributed.agreement import Agreement

_MESSAGE = 16 * 2**20
"""Bytes of the measured all-reduce."""

_VARIABLES = re.compile("(TORCH_)?(NCCL|GLOO|FR|DISTRIBUTED)_|OMP_NUM_THREADS$|CUDA_DEVICE_ORDER$")
"""Pattern of environment variables that all ranks normally share."""

_SIOCGIFADDR = 0x8915
"""Request for the IPv4 address of a network interface, from Linux's ``sockios.h``."""


def facts_of_rank(device: torch.device) -> dict[str, Any]:
    """Return the facts of this rank. A fact that cannot be read is replaced by the error, so that no rank fails."""
    readers: dict[str, Callable[[], Any]] = {
        "host": socket.gethostname,
        "Python": platform.python_version,
        "torch": lambda: torch.__version__,
        "flatout": lambda: flatout.__version__,
        "CUDA": lambda: torch.version.cuda or "none",
        "driver": lambda: next((f.version for f in facts.driver() if f.version), "none"),
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        "backends": lambda: ", ".join(backends()) or "none",
        "interface": lambda: interface("GLOO_SOCKET_IFNAME"),
        "NCCL interface": lambda: interface("NCCL_SOCKET_IFNAME"),
        "device": lambda: str(device),
        "device id": lambda: device_id(device),
        "variables": lambda: {name: text for name, text in os.environ.items() if _VARIABLES.match(name)},
    }
    return {name: _or_error(read) for name, read in readers.items()}


def _or_error(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return f"could not be looked at: {first_line(error)}"


def backends() -> list[str]:
    """Return the backends of torch's build."""
    has = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, is_available in has.items() if is_available()]


def device_id(device: torch.device) -> str:
    """Return a text that is equal on two ranks if they share a GPU; empty for the CPU and for a GPU that fails."""
    if device.type != "cuda":
        return ""
    with suppress(RuntimeError):
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
        return str(uuid) or f"{socket.gethostname()} {device}"
    return ""


@dataclass(frozen=True)
class Interface:
    """Network interface of a rank.

    Attributes:
        found: name and address; the names of all interfaces if the variable names no interface.
        variable: variable that names the interface; empty for the address of the host's name.
        missing: the variable and its value, if no interface has this name.
    """

    found: str
    variable: str = ""
    missing: str = ""


def interface(variable: str) -> Interface:
    """Return the network interface that a variable names, or the address of the host's name if the variable is not set.

    NCCL also accepts prefixes. ``eth`` stands for all interfaces whose names begin with ``eth``. ``^lo`` stands for all
    interfaces whose names do not begin with ``lo``. ``=eth0`` stands for this interface alone.
    """
    setting = os.environ.get(variable, "")
    names = [name for _, name in socket.if_nameindex()]
    if not setting:
        return Interface(_address_of_host())
    entries = setting.lstrip("^=").split(",")
    if variable.startswith("GLOO") or setting.startswith("="):
        chosen = [name for name in names if name in entries]
    else:
        excluded = setting.startswith("^")
        chosen = [name for name in names if name.startswith(tuple(entries)) != excluded]
    if not chosen:
        return Interface(", ".join(names), variable, f"{variable}={setting}")
    return Interface(", ".join(f"{name} {_address(name)}" for name in chosen), variable)


def _address_of_host() -> str:
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "no address"


def _address(name: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return "without an IPv4 address"


def measure(ranks: Agreement, device: torch.device, *, is_shared: bool) -> Facts:
    """Measure one agreement, and an all-reduce on the backend that a training uses.

    Args:
        ranks: all ranks.
        device: device of this rank.
        is_shared: True if two ranks use one GPU, which NCCL refuses.

    Returns:
        ``latency_ms``, ``backend``, and ``bandwidth`` in GB/s or ``error``.
    """
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        ranks.check()
        times.append(time.perf_counter() - begun)
    (latency,) = ranks.largest([statistics.median(times)])
    if is_shared:
        return Facts(latency_ms=1e3 * latency)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        with ranks.attempt():
            message = torch.zeros(_MESSAGE // 4, device=device)
            ranks.check()  # after a failure on one rank, no rank starts a collective of the other group
            seconds = _all_reduce_seconds(message, backend)
            (seconds,) = ranks.largest([seconds])
    except RuntimeError as error:
        return Facts(latency_ms=1e3 * latency, backend=backend, error=first_line(error))
    moved = 2 * (ranks.size - 1) / ranks.size * _MESSAGE
    return Facts(latency_ms=1e3 * latency, backend=backend, bandwidth=moved / seconds / 1e9)


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

"""Process groups of flatout.

Under ``torchrun``, flatout makes the default group if the script has none. It also makes groups for agreement and for
gradients.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flatout.distributed import failures
from flatout.distributed.agreement import TIMEOUT

_LAUNCHED_BY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of torchrun, and of other launchers that follow torch's convention."""

_is_joined = False
_default: Any = None
_beside: dict[str, Any] = {}
"""Groups of all ranks in addition to the default group ``_default``, by their use."""


def group_size() -> int:
    """Return the number of processes in the default process group, or 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_launched() -> bool:
    """Return True if a launcher such as ``torchrun`` has started this process as one of several ranks."""
    size = os.environ.get("WORLD_SIZE", "")
    return (
        dist.is_available()
        and all(os.environ.get(name) for name in _LAUNCHED_BY)
        and size.isdecimal()
        and int(size) > 1
    )


def local_device() -> torch.device:
    """Return the device of this rank, which is ``cuda:LOCAL_RANK`` modulo the visible devices, or the CPU.

    Without ``LOCAL_RANK``, the number is ``RANK``. The launcher is then expected to start as many ranks as devices on
    each machine, in the order of ``RANK``.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = os.environ.get("LOCAL_RANK") or os.environ.get("RANK", "0")
    # With `torchrun --virtual-local-rank`, only one device is visible in each rank.
    return torch.device("cuda", int(number) % torch.cuda.device_count())


def join(device: torch.device, timeout: timedelta = TIMEOUT) -> None:
    """Make the default process group from the launcher's variables, with NCCL for a CUDA device, else with gloo.

    The group ends with the process, and all ranks end if one fails. Nothing happens if a group exists.

    After ``torchrun --max-restarts``, the agent's store still has the addresses of the last attempt (torch 2.14,
    pytorch #135712). So the keys of this group begin with the number of the restart.

    Args:
        device: device of this rank.
        timeout: time after which a collective fails, and after which a missing rank is an error.
    """
    global _is_joined
    if dist.is_initialized():
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        wait_for_workers=False,
        timeout=timeout,
    )
    store = dist.PrefixStore(f"flatout/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    _is_joined = True
    atexit.register(_leave)
    failures.watch(dist.group.WORLD)


def is_joined() -> bool:
    """Return True if ``join`` has made the default process group."""
    return _is_joined and dist.is_initialized()


def _leave() -> None:
    if dist.is_initialized():
        with failures.limited():
            dist.destroy_process_group()


def control_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks for agreement on host values. All ranks must call this together.

    The agreement has its own group, even if the default group uses gloo. In a shared group, gloo would match a
    collective of a failed rank with any other collective of the same size.
    """
    return _group_beside("control", "gloo")


def gradient_group() -> dist.ProcessGroup:
    """Return a group of all ranks for gradients. All ranks must call this together.

    A rank that fails counts the collectives of this group, to find the collectives that the others still wait for. So
    the collectives of the model and of the script must use another group.
    """
    return _group_beside("gradients", None)


def _group_beside(use: str, backend: str | None) -> dist.ProcessGroup:
    """Return the group for a use. If ``backend`` is None, the group has the backends of the default group."""
    global _default
    if _default is not dist.group.WORLD:
        _default = dist.group.WORLD
        _beside.clear()
        failures.watch(_default)
    if use not in _beside:
        _beside[use] = dist.new_group(backend=backend, timeout=TIMEOUT)
    return _beside[use]

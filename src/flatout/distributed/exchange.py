"""Exchange of a few numbers between all ranks, over Unix sockets on one machine, else with gloo.

Sending and receiving are separate calls. If all ranks send early, they receive the numbers without a wait.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

_MOST_RANKS = 64
"""Limit of the number of ranks with sockets, because each rank sends to all others one after the other."""


class Exchange(Protocol):
    """Exchange of rows of numbers between all ranks. All ranks must alternate between ``send`` and ``receive``.

    Raises:
        OSError: a rank has ended, or does not answer. Both methods may raise this.
        RuntimeError: as ``OSError``.
    """

    def send(self, row: Sequence[float]) -> None:
        """Send the row of this rank to all others, without waiting for their rows."""

    def receive(self) -> list[list[float]]:
        """Return the rows of all ranks, by rank."""

    def limit(self, timeout: timedelta) -> None:
        """Set the time after which ``receive`` fails."""

    def close(self) -> None:
        """Close the connections. The other ranks get an error from ``receive``."""


class LocalExchange:
    """Exchange over sockets between all pairs of ranks, which takes less time than an all-reduce of gloo.

    Args:
        rank: number of this rank.
        peers: connections to the other ranks.
        width: numbers of a row.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], width: int) -> None:
        self._rank, self._peers = rank, peers
        for peer in peers.values():
            weakref.finalize(self, peer.close)
        self._form = struct.Struct(f"{width}d")
        self._own: list[float] = []

    def send(self, row: Sequence[float]) -> None:
        self._own = list(row)
        data = self._form.pack(*row)
        for peer in self._peers.values():
            peer.send(data)

    def receive(self) -> list[list[float]]:
        rows = {self._rank: self._own}
        for rank, peer in self._peers.items():
            try:
                data = peer.recv(self._form.size)
            except BlockingIOError as error:
                raise TimeoutError("timed out") from error
            if len(data) != self._form.size:
                raise ConnectionResetError("connection closed by peer")
            rows[rank] = list(self._form.unpack(data))
        return [rows[rank] for rank in range(len(rows))]

    def limit(self, timeout: timedelta) -> None:
        limit = struct.pack("ll", timeout // timedelta(seconds=1), timeout.microseconds)
        for peer in self._peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # settimeout() adds a poll to every call

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class GlooExchange:
    """Exchange by an all-reduce.

    Args:
        group: a gloo group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, row: Sequence[float]) -> None:
        # Each rank adds its row to zeros, because an all-gather is eight times slower on gloo.
        self._rows = torch.zeros(dist.get_world_size(self._group), len(row), dtype=torch.float64)
        self._rows[dist.get_rank(self._group)] = torch.tensor(row, dtype=torch.float64)
        self._work: Any = dist.all_reduce(self._rows, group=self._group, async_op=True)

    def receive(self) -> list[list[float]]:
        self._work.wait()
        return self._rows.tolist()

    def limit(self, timeout: timedelta) -> None:
        dist.distributed_c10d._set_pg_timeout(timeout, self._group)

    def close(self) -> None:
        """Do nothing, because the owner of the group destroys it."""


def connect(group: dist.ProcessGroup, width: int, timeout: timedelta) -> Exchange:
    """Connect all ranks. All ranks must call this together.

    Sockets are used for at most 64 ranks of one machine under Linux.

    Args:
        group: a gloo group of all ranks that no other code uses.
        width: numbers of a row.
        timeout: time after which ``receive`` fails.
    """
    peers = None
    if sys.platform == "linux" and dist.get_world_size(group) <= _MOST_RANKS:
        peers = _connections(group)
    made = GlooExchange(group) if peers is None else LocalExchange(dist.get_rank(group), peers, width)
    made.limit(timeout)
    return made


def _connections(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Return a connection to every other rank, by rank, or None if the ranks are on several machines."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with ExitStack() as stack:
        server = stack.enter_context(_socket())
        # Only this user can open the folder, so no other user can connect.
        folder = [stack.enter_context(tempfile.TemporaryDirectory(prefix="flatout-")) if rank == 0 else ""]
        dist.broadcast_object_list(folder, group=group, group_src=0)
        addresses = [os.path.join(folder[0], str(each)) for each in range(size)]
        if not _on_all(_listens(server, addresses[rank], size), group):
            return None
        peers = {other: _socket() for other in range(rank)}
        if not _on_all(all(_reaches(peer, addresses[other], rank) for other, peer in peers.items()), group):
            return None
        for _ in range(rank + 1, size):
            peer, _address = server.accept()
            peers[int(peer.recv(8))] = peer
    return peers


def _on_all(is_true: bool, group: dist.ProcessGroup) -> bool:
    on_all = torch.tensor(is_true)
    dist.all_reduce(on_all, op=dist.ReduceOp.MIN, group=group)
    return bool(on_all)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # preserves the boundaries of messages


def _listens(server: socket.socket, address: str, size: int) -> bool:
    """Listen for other ranks. Return False if the system rejects the address, for example on another machine."""
    try:
        server.bind(address)
    except OSError:
        return False
    server.listen(size)
    return True


def _reaches(peer: socket.socket, address: str, rank: int) -> bool:
    """Connect to another rank and send the number of this rank. Return False if it is on another machine."""
    try:
        peer.connect(address)
        peer.send(str(rank).encode())
    except OSError:
        return False
    return True

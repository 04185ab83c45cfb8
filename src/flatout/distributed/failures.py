"""Handling of failures of single ranks. Every rank names the first failure and ends, even in a blocked collective."""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType

import torch.distributed as dist

from flatout.core.formatting import first_line
from flatout.core.standard_error import say
from flatout.distributed.agreement import LostRank, RankFailure, after

_INTERVAL = 0.5
"""Seconds from one check of the store to the next."""

_PATIENCE = 2 * _INTERVAL + 0.1
"""Seconds in which every running rank checks the store at least once, and so finds a failure."""

_GRACE = 1.0
"""Seconds in which a rank may end by itself after another rank has failed."""

_CLOSING = 2.0
"""Seconds in which the process group may close after a failure."""

_LEFT = "left"
"""Entry of ``first`` if rank 0, which runs the store's server, ends without a failure."""

_OF_A_COLLECTIVE = re.compile("gloo|nccl|connection (closed|reset)", re.IGNORECASE)
"""Pattern of the errors of a collective. Gloo raises them as ``RuntimeError``."""


@dataclass(frozen=True)
class Failure:
    """Failure of a rank.

    Attributes:
        rank: rank that failed.
        host: name of the rank's machine.
        error: first line of the error. Empty if the rank has ended without a Python error.
        traceback: traceback of the error.
    """

    rank: int
    host: str
    error: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank} on host {self.host}"
        if self.error:
            return f"{who} failed: {self.error}"
        return f"{who} has ended without an error of Python. It may have been killed for memory: see dmesg"


class FailureMonitor:
    """Monitor of all ranks of a group, with a ``sys.excepthook`` and a thread in each rank.

    A rank that fails shows its traceback as usual, and then writes its failure to the group's store. The threads of the
    other ranks find the failure in the store. They end their processes, because a rank that is blocked in a collective
    cannot continue. A collective may fail because another rank has failed. This rank then shows the failure of the
    other rank instead of its own traceback.

    Args:
        group: the default process group.
        store: store of the group. Each rank opens another connection, because calls on a shared connection wait for
            each other.
        number: number of earlier monitors, equal on all ranks.

    Attributes:
        group: the default process group.
        has_failed: True after an error of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, store: dist.Store, number: int) -> None:
        self.group = group
        self._server = store  # keeps the store alive if the script destroys the group
        self._store = dist.PrefixStore(f"flatout/failures/{number}", store.clone())
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._host = socket.gethostname()
        self._has_server = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._process = os.getpid()
        self._first: Failure | None = None
        self._is_known, self._is_stopped = threading.Event(), threading.Event()
        self.has_failed = False
        self._is_shown = threading.Lock()
        self._store.set(f"host/{self._rank}", self._host)
        self._show = sys.excepthook
        sys.excepthook = self._on_error
        self._thread = threading.Thread(target=self._watch, name="flatout-failures", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the monitor, and restore ``sys.excepthook`` unless the script has replaced it."""
        atexit.unregister(self.close)
        if os.getpid() != self._process or self._is_stopped.is_set():
            return
        self._is_stopped.set()
        self._thread.join()
        self._restore_hook()
        if self._has_server:
            self._wait_for_others()

    def _restore_hook(self) -> None:
        if sys.excepthook == self._on_error:
            sys.excepthook = self._show

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_in_group = os.getpid() == self._process and dist.group.WORLD is self.group
        if not is_in_group or not isinstance(error, Exception):  # KeyboardInterrupt is not a failure
            self._show(kind, error, trace)
            return
        self.has_failed = True
        own = Failure(self._rank, self._host, first_line(error), "".join(traceback.format_exception(error)))
        lost = None
        if _is_of_another_rank(error):
            lost = self._lost()
            if self._is_known.is_set():
                self._explain()
                return
            if lost is not None:
                say(f"rank {self._rank} ends: {lost}")
        self._show(kind, error, trace)
        self._publish(lost or own)
        if lost is None:
            _record(error, trace)

    def _lost(self) -> Failure | None:
        """Wait for the failure of another rank.

        Returns:
            The failure of a rank that no longer checks the store, or of rank 0 if the store has ended. None if another
                failure is in the store, or if all ranks still check it.
        """
        try:
            before = self._looks()
            if self._is_known.wait(_PATIENCE):
                return None
            after = self._looks()
            silent = [rank for rank, looks in after.items() if looks == before[rank] and rank != self._rank]
            return Failure(silent[0], self._store.get(f"host/{silent[0]}").decode()) if silent else None
        except RuntimeError:  # the store has ended
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return None
            return Failure(0, os.environ.get("MASTER_ADDR", "unknown"))

    def _looks(self) -> dict[int, int]:
        return {rank: self._store.add(f"looks/{rank}", 0) for rank in range(self._size)}

    def _publish(self, failure: Failure | None) -> None:
        with suppress(RuntimeError):  # the store has ended
            self._store.compare_set("first", "", json.dumps(asdict(failure)) if failure else _LEFT)

    def _watch(self) -> None:
        try:
            while not self._is_stopped.wait(_INTERVAL) and dist.group.WORLD is self.group:
                self._store.add(f"looks/{self._rank}", 1)
                if self._store.check(["first"]):
                    first = self._store.get("first").decode()
                    self._first = None if first == _LEFT else Failure(**json.loads(first))
                    break
            self._store.add(_LEFT, 1)
        except RuntimeError:  # the store has ended
            return
        if dist.group.WORLD is not self.group:
            self._restore_hook()
        if self._first is None or self._first.rank == self._rank:
            return
        self._is_known.set()
        if not self._is_stopped.wait(_GRACE) and not self.has_failed:
            self._explain()
            _end()

    def _explain(self) -> None:
        """Print the first failure once. Rank 0 also prints its traceback, if the failed rank is on another machine."""
        first = self._first
        if first is None or not self._is_shown.acquire(blocking=False):
            return
        is_elsewhere = self._rank == 0 and first.host != self._host
        say(f"rank {self._rank} ends: {first}" + (f"\n{first.traceback}" if is_elsewhere else ""))

    def _wait_for_others(self) -> None:
        """Keep the store alive until no other rank uses it, for a limited time."""
        self._publish(None)
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and self._store.add(_LEFT, 0) < self._size:
            time.sleep(0.01)


_monitor: FailureMonitor | None = None
_number = 0


def watch(group: dist.ProcessGroup | None) -> None:
    """Monitor the ranks of the default process group, until the group or the process ends.

    All ranks must call this together. Nothing happens if the group is monitored already, or has no ``TCPStore``.
    """
    global _monitor, _number
    if _monitor is not None:
        if _monitor.group is group:
            return
        _monitor.close()
    store = dist.distributed_c10d._get_default_store()
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.TCPStore):
        _monitor = FailureMonitor(group, store, _number)
        _number += 1


@contextmanager
def limited() -> Iterator[None]:
    """Limit the time of a block after a failure of this rank. To close a group, torch may wait for a lost rank."""
    if _monitor is None or not _monitor.has_failed:
        yield
        return
    with after(_CLOSING, _end):
        yield


def _is_of_another_rank(error: BaseException | None) -> bool:
    """Return True if another rank's failure may be the cause of an error."""
    while error is not None:
        if isinstance(error, (LostRank, dist.DistError)):
            return True
        if isinstance(error, RankFailure) and error.__cause__ is None:
            return True
        if type(error) is RuntimeError and _OF_A_COLLECTIVE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _record(error: BaseException, trace: TracebackType | None) -> None:
    """Write torchrun's error file, so that torchrun's summary shows the error. An existing file stays."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or os.path.exists(file):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # the import takes 0.1 s

    try:
        raise error.with_traceback(trace)  # torch formats the exception that is being handled
    except BaseException:
        with suppress(OSError):
            get_error_handler().record_exception(error)


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)

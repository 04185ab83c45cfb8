"""Agreement of all ranks on values of rank 0, on the largest value, and on failures.

Every call is one exchange of the same kind and shape, in which each rank sends a row of numbers to all ranks. So a rank
that fails outside of an exchange can report its failure in the other ranks' next exchange, of any purpose. All ranks
then stop at the same place with the same failure.
"""

from __future__ import annotations

import io
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flatout.core.errors import ran_out_of_memory
from flatout.core.formatting import first_line
from flatout.core.standard_error import say
from flatout.distributed import exchange

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""Time after which a collective fails. A rank may load data or compile for minutes while the others wait."""

_VALUES = 12
"""Number of values in one message, in addition to its status. A longer list takes more messages."""

_LEVEL, _KIND, _IS_OUT_OF_MEMORY, _CALL, _FIRST = 0, 1, 2, 3, 4
"""Positions in a message.

A message has the number of attempts around a failure, or 0 without a failure. Then follow the type of the error, 1 if
the error is an out of memory, the call, and the values.
"""

STEP = "run.step"
"""Name of the call of every step. To wait for other ranks is normal in a step."""

PATIENCE_SECONDS = 30.0
"""Seconds after which a call other than a step prints that it waits."""


class RankFailure(RuntimeError):
    """Failure on some of the ranks, which has stopped all. ``__cause__`` is the error of this rank, if it has failed.

    Attributes:
        level: number of attempts around the failure. The failure ends the attempts that are nested this deep or deeper.
    """

    level: int


class RankOutOfMemory(RankFailure, torch.OutOfMemoryError):
    """Failure of ranks that have all run out of memory. No rank has failed in another way."""


class _Unwinding(BaseException):
    """Exception that carries a failure to its attempt.

    Handlers of ``Exception`` do not catch it, because the failed rank is not in their blocks.
    """

    def __init__(self, failure: RankFailure) -> None:
        self.failure = failure


class LostRank(ConnectionError):
    """Error of a rank if another rank has ended, or does not answer."""


class RanksApart(RuntimeError):
    """Error of ranks that have made different calls, and so cannot agree on a value."""


class OutOfStep(RuntimeError):
    """Failure of this rank that the others cannot learn of, so that no later call can agree on anything.

    The others wait for a collective that this rank cannot take part in, or have its message that it has not failed.
    """


class OwnError:
    """Context manager that raises the error of this rank in place of the ``RankFailure`` that it has caused.

    The manager is a class, because every step enters it and a generator takes a microsecond.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        own = error.__cause__ if isinstance(error, RankFailure) else None
        if own is not None:
            context = own.__context__
            try:
                raise own
            finally:
                own.__context__ = context  # otherwise Python would print the failure of the ranks first


class Message:
    """Numbers that a rank sends at the end of an attempt, and numbers that the rank receives.

    Attributes:
        values: at most 12 numbers of this rank. All ranks must send equally many.
        received: values of every rank, by rank, after the attempt.
        is_sent: True after ``send``.
    """

    def __init__(self, send: Callable[[Sequence[float]], None] = lambda values: None) -> None:
        self.values: Sequence[float] = ()
        self.received: list[list[float]] = []
        self.is_sent = False
        self._send = send

    def send(self) -> None:
        """Send the values before the end of the attempt, so that the others need not wait for them at its end.

        The message also reports that the attempt has not failed on this rank. A later failure raises ``OutOfStep``.
        """
        if not self.is_sent:
            self.is_sent = True
            self._send(self.values)


class Agreement:
    """Agreement of a single process, in which every method returns its argument.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks, or NaN for a value that is NaN on some rank.

        All ranks must pass equally many values.
        """
        return list(values)

    def smallest(self, values: Sequence[float]) -> list[float]:
        """Return the smallest of each value over all ranks. See ``largest``."""
        return [-value for value in self.largest([-value for value in values])]

    def total(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        return number

    def all_hold(self, condition: bool) -> bool:
        """Return True if a condition holds on all ranks."""
        return not any(self.largest([not condition]))

    def first(self, value: T) -> T:
        """Return rank 0's value. The value must be picklable."""
        return value

    def now(self) -> float:
        """Return ``time.perf_counter()`` of rank 0, in seconds. Use the result for decisions, not for measurements."""
        return time.perf_counter()

    def every(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. The values must be picklable."""
        return [value]

    def attempt(self, call: str = "") -> AbstractContextManager[Message]:
        """Run a block that fails on all ranks if it fails on one, and exchange a message at its end.

        The block's own error is raised if all ranks have failed with an error of the same type.

        Args:
            call: name of the user's call that all ranks must make. The default is the call of the enclosing attempt.

        Raises:
            RankFailure: the block failed on some of the ranks.
            RanksApart: another rank has made another call.
            OutOfStep: the block failed on this rank after the message was sent.
        """
        return _OwnAttempt()

    def check(self) -> None:
        """Wait for all ranks.

        Raises:
            RankFailure: another rank has failed.
        """

    def limit(self, timeout: timedelta) -> None:
        """Set the time after which a rank that does not answer counts as lost."""

    def close(self) -> None:
        """Leave the agreement. Later calls on other ranks raise ``LostRank``."""


ALONE = Agreement()
"""Agreement of a training in one process."""


class _OwnAttempt:
    """Attempt of a single process."""

    def __enter__(self) -> Message:
        self._message = Message()
        return self._message

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._message.received = [list(self._message.values)]


class GroupAgreement(Agreement):
    """Agreement of all ranks of the default process group. Each call takes tens of microseconds on one machine.

    All ranks must make the same calls in the same order, from their main threads. A rank may leave this order only by
    an error inside ``attempt``.

    Args:
        group: a gloo group of all ranks that no other code uses.

    Raises:
        LostRank: a rank has ended or does not answer. Every method may raise this.
        RanksApart: ranks have made different calls of the user. Every method may raise this.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._level = 0
        self._call = ""
        self._broken: Exception | None = None
        self._rows = exchange.connect(group, _FIRST + _VALUES, TIMEOUT)

    def largest(self, values: Sequence[float]) -> list[float]:
        return [math.nan if any(map(math.isnan, column)) else max(column) for column in self._columns(values)]

    def total(self, number: float) -> float:
        return math.fsum(row[0] for row in self._exchange([number]))

    def now(self) -> float:
        return self._exchange([time.perf_counter()])[0][0]

    def first(self, value: T) -> T:
        box = [encoded(value) if self.rank == 0 else b""]  # an error here must come before the collective
        self.check()
        with _LOST:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return decoded(box[0])

    def every(self, value: T) -> list[T]:
        data = encoded(value)
        self.check()
        return [decoded(each) for each in self._gathered(data)]

    def check(self) -> None:
        self._exchange(())

    def attempt(self, call: str = "") -> AbstractContextManager[Message]:
        return _Attempt(self, call)

    def limit(self, timeout: timedelta) -> None:
        self._rows.limit(timeout)

    def close(self) -> None:
        self._broken = LostRank("this rank has left the agreement")
        self._rows.close()
        with suppress(Exception):  # the script has destroyed all groups
            dist.destroy_process_group(self._group)

    def _columns(self, values: Sequence[float]) -> Iterator[tuple[float, ...]]:
        for begin in range(0, len(values), _VALUES):
            rows = self._exchange(values[begin : begin + _VALUES])
            yield from zip(*rows, strict=True)

    def _exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of each rank, by rank.

        Raises:
            _Unwinding: another rank has sent a failure.
        """
        self._send(values)
        return self._received(len(values))

    def _send(self, values: Sequence[float], status: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        if self._broken is not None:  # rows of the failed step would be read as those of later calls
            raise self._broken
        row = [*status, _number(self._call), *values, *[0.0] * (_VALUES - len(values))]
        with _LOST:
            self._rows.send(row)

    def _received(self, count: int) -> list[list[float]]:
        """Return a number of values of each rank, after ``_send``. Raises as ``_exchange``."""
        rows = self._all_rows()
        if any(row[_LEVEL] for row in rows):
            raise _Unwinding(self._failure(rows, ""))
        return [row[_FIRST : _FIRST + count] for row in rows]

    def _all_rows(self) -> list[list[float]]:
        try:
            with _LOST, self._patience():
                rows = self._rows.receive()
        except LostRank as error:
            self._broken = error  # no later call waits for the same rank
            raise
        has_failed = any(row[_LEVEL] for row in rows)  # a rank that fails may have left its call
        if not has_failed and any(row[_CALL] != rows[0][_CALL] for row in rows):
            calls = [f"{call or 'another'} on rank {rank}" for rank, call in enumerate(self._texts(self._call))]
            raise RanksApart(f"all ranks must make the same calls, got {', '.join(calls)}. Make each call on all ranks")
        return rows

    def _patience(self) -> AbstractContextManager[Any]:
        """Print after a while that other ranks are missing, because the user may have called from one rank only."""
        if self._call in ("", STEP):
            return nullcontext()
        text = f"{self._call} waits for the other ranks. Call it on all ranks, not on rank {self.rank} alone"
        return after(PATIENCE_SECONDS, lambda: say(text))

    def _fail(self, error: Exception) -> None:
        """Send an error of this rank. Return if all ranks have sent an error of the same type from the same attempt.

        Raises:
            RankFailure: other ranks have not failed, or have another error.
            _Unwinding: another rank has failed in an outer attempt.
        """
        kind = _number(f"{type(error).__module__}.{type(error).__qualname__}")
        self._send((), (self._level, kind, float(ran_out_of_memory(error))))
        rows = self._all_rows()
        failure = self._failure(rows, f"rank {self.rank}: {first_line(error)}")
        if all(row[:_FIRST] == rows[0][:_FIRST] for row in rows):
            return
        failure.__cause__ = error
        raise failure if failure.level == self._level else _Unwinding(failure)

    def _failure(self, rows: list[list[float]], text: str) -> RankFailure:
        """Return the failure of all ranks.

        Args:
            rows: the messages of all ranks.
            text: error of this rank. Empty if this rank has not failed.
        """
        failed = [row for row in rows if row[_LEVEL]]
        told = [each for each in self._texts(text) if each]
        kind = RankOutOfMemory if all(row[_IS_OUT_OF_MEMORY] for row in failed) else RankFailure
        failure = kind(told[0])
        failure.level = int(min(row[_LEVEL] for row in failed))
        return failure

    def _texts(self, text: str) -> list[str]:
        return [data.decode() for data in self._gathered(text.encode())]

    def _gathered(self, data: bytes) -> list[bytes]:
        box: list[Any] = [None] * self.size
        with _LOST:
            dist.all_gather_object(box, data, group=self._group)
        return box


class _Attempt:
    """Attempt of a rank, as a class, because every step enters an attempt and a generator takes more time."""

    def __init__(self, ranks: GroupAgreement, call: str) -> None:
        self._ranks, self._call = ranks, call

    def __enter__(self) -> Message:
        ranks = self._ranks
        ranks._level += 1
        self._around, ranks._call = ranks._call, self._call or ranks._call
        self._message = Message(ranks._send)
        return self._message

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        ranks, message = self._ranks, self._message
        level = ranks._level
        try:
            if error is None:
                message.send()
                message.received = ranks._received(len(message.values))
            elif isinstance(error, _Unwinding):
                raise error
            elif isinstance(error, OutOfStep):
                ranks._broken = error
            elif isinstance(error, Exception) and not isinstance(error, _OF_ALL):
                if message.is_sent:
                    ranks._broken = OutOfStep("this rank has failed after its message that the step has succeeded")
                    raise ranks._broken from error
                ranks._fail(error)
        except _Unwinding as unwinding:
            if unwinding.failure.level < level:
                raise
            raise unwinding.failure from unwinding.failure.__cause__
        finally:
            ranks._level, ranks._call = level - 1, self._around


_OF_ALL = (RankFailure, LostRank, RanksApart)
"""Errors that stop all ranks, so that no rank sends them to others."""

PARTED = (LostRank, RanksApart, OutOfStep)
"""Errors after which the ranks cannot agree on anything."""


def encoded(value: Any) -> bytes:
    """Return a value as bytes. torch's collectives use plain pickles, which cannot hold uint32 tensors (torch 2.14)."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def decoded(data: bytes) -> Any:
    """Return the value that ``encoded`` has converted into bytes, with tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _number(text: str) -> float:
    """Return a number that identifies a text."""
    return float(zlib.crc32(text.encode()))


class _Lost:
    """Context manager that converts errors of an exchange, or of a collective on the host, into ``LostRank``."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (RuntimeError, OSError)):  # connection closed by peer, or timed out
            raise LostRank(f"another rank has ended, or does not answer: {first_line(error)}") from error


_LOST = _Lost()


@contextmanager
def after(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Call a function on another thread if the block has not ended after ``seconds``."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()

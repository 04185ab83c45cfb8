"""Agreement of all ranks: on rank 0's values, on the largest value, and on failures.

Every call is one exchange of the same kind and shape: a row of numbers from each rank to all. So a rank that fails
outside of an exchange can tell the others, whatever they agree on next. They stop at the same place, and the failure
is that of all ranks.
"""

from __future__ import annotations

import io
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flatout.core.formatting import first_line
from flatout.core.out_of_memory import ran_out_of_memory
from flatout.core.standard_error import say
from flatout.core.timers import after
from flatout.distributed import local_exchange

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""Time after which a collective fails. A rank may load data or compile for minutes while the others wait."""

_VALUES = 12
"""Numbers that one message carries beside its status. A longer list takes more messages."""

_LEVEL, _KIND, _IS_OUT_OF_MEMORY, _CALL, _FIRST = 0, 1, 2, 3, 4
"""Places in a message: the number of attempts around a failure, or 0; the type of the error; the call; the values."""

STEP = "run.step"
"""Call of every step, which waits for other ranks as a rule."""

PATIENCE_SECONDS = 30.0
"""Seconds after which a call other than a step says that it waits."""


class RankFailure(RuntimeError):
    """A failure on some of the ranks, which has stopped all. ``__cause__`` is the error of this rank, if it has failed.

    Attributes:
        level: number of attempts around the failure; the innermost ones end with it.
    """

    level: int


class RankOutOfMemory(RankFailure, torch.OutOfMemoryError):
    """Some of the ranks have run out of memory, and none has failed otherwise."""


class _Unwinding(BaseException):
    """Carries a failure to its attempt, past handlers of ``Exception``: the failed rank is not in their blocks."""

    def __init__(self, failure: RankFailure) -> None:
        self.failure = failure


class LostRank(ConnectionError):
    """Another rank has ended, or does not answer."""


class RanksApart(RuntimeError):
    """Ranks have made different calls, so that they cannot agree on anything."""


class OutOfStep(RuntimeError):
    """This rank owes the others a collective that it cannot make. They wait there, so no attempt can tell them."""


class OwnError:
    """Context manager that raises the error of this rank in place of the ``RankFailure`` that it has caused.

    A class, because every step enters it: a generator takes a microsecond.
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
                own.__context__ = context  # not the failure of the ranks, which would be printed first


class Message:
    """Numbers that a rank sends at the end of an attempt, and those that it receives.

    Attributes:
        values: numbers of this rank, at most 12. All ranks must send the same number of them.
        received: values of every rank, by rank, after the attempt.
    """

    def __init__(self) -> None:
        self.values: Sequence[float] = ()
        self.received: list[list[float]] = []


class Agreement:
    """Agreement of a single process with itself: every value is agreed already.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks; NaN if one is NaN.

        All ranks must give the same number of values.
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
        """Return rank 0's value. It must be picklable."""
        return value

    def now(self) -> float:
        """Return ``time.perf_counter()`` of rank 0, in seconds: for decisions, not for measurements."""
        return time.perf_counter()

    def every(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. They must be picklable."""
        return [value]

    @contextmanager
    def attempt(self, call: str = "") -> Iterator[Message]:
        """Run a block that fails on all ranks if it fails on one, and exchange a message at its end.

        The block's own error is raised if all ranks have failed with an error of the same type.

        Args:
            call: the call of the user that all ranks must make; default: that of the attempt around this one.

        Raises:
            RankFailure: the block failed on some of the ranks.
            RanksApart: another rank has made another call.
        """
        message = Message()
        yield message
        message.received = [list(message.values)]

    def check(self) -> None:
        """Wait for all ranks.

        Raises:
            RankFailure: another rank has failed in its attempt.
        """


ALONE = Agreement()
"""Agreement of a training in one process."""


class GroupAgreement(Agreement):
    """Agreement of all ranks of the default process group. Each call takes tens of microseconds on one machine.

    All ranks must make the same calls in the same order, from their main threads. A rank may leave this order only by
    an error inside ``attempt``.

    Args:
        group: a gloo group of all ranks that nothing else uses.

    Raises:
        LostRank: from every method, if a rank has ended.
        RanksApart: from every method, if ranks have made different calls of the user.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._level = 0
        self._call = ""
        self._local = local_exchange.connect(group, _FIRST + _VALUES, TIMEOUT)

    def largest(self, values: Sequence[float]) -> list[float]:
        return [math.nan if any(map(math.isnan, column)) else max(column) for column in self._columns(values)]

    def total(self, number: float) -> float:
        return math.fsum(row[0] for row in self._exchange([number]))

    def now(self) -> float:
        return self._exchange([time.perf_counter()])[0][0]

    def first(self, value: T) -> T:
        box = [encoded(value) if self.rank == 0 else b""]  # an error here must come before the collective
        self.check()
        with _lost():
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        return decoded(box[0])

    def every(self, value: T) -> list[T]:
        data = encoded(value)
        self.check()
        return [decoded(each) for each in self._gathered(data)]

    def check(self) -> None:
        self._exchange(())

    @contextmanager
    def attempt(self, call: str = "") -> Iterator[Message]:
        self._level += 1
        level, message, around = self._level, Message(), self._call
        self._call = call or around
        try:
            yield message
            message.received = self._exchange(message.values)
        except _Unwinding as unwinding:
            if unwinding.failure.level < level:
                raise
            raise unwinding.failure from unwinding.failure.__cause__
        except (RankFailure, LostRank, RanksApart, OutOfStep):
            raise
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._level, self._call = level - 1, around

    def _columns(self, values: Sequence[float]) -> Iterator[tuple[float, ...]]:
        for begin in range(0, len(values), _VALUES):
            rows = self._exchange(values[begin : begin + _VALUES])
            yield from zip(*rows, strict=True)

    def _exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of each rank, by rank.

        Raises:
            _Unwinding: another rank has sent a failure.
        """
        rows = self._sent([0.0, 0.0, 0.0], values)
        if any(row[_LEVEL] for row in rows):
            raise _Unwinding(self._failure(rows, ""))
        return [row[_FIRST : _FIRST + len(values)] for row in rows]

    def _sent(self, status: list[float], values: Sequence[float] = ()) -> list[list[float]]:
        row = [*status, _number(self._call), *values, *[0.0] * (_VALUES - len(values))]
        with _lost(), self._patience():
            rows = self._over_gloo(row) if self._local is None else self._local(row)
        has_failed = any(row[_LEVEL] for row in rows)  # a rank that fails may have left its call
        if not has_failed and any(row[_CALL] != rows[0][_CALL] for row in rows):
            calls = [f"{call or 'another'} on rank {rank}" for rank, call in enumerate(self._texts(self._call))]
            raise RanksApart(f"all ranks must make the same calls, got {', '.join(calls)}. Make each call on all ranks")
        return rows

    def _over_gloo(self, row: list[float]) -> list[list[float]]:
        # The sum of one row from each rank and zeros: an all-gather is eight times slower on gloo.
        message = torch.zeros(self.size, len(row), dtype=torch.float64)
        message[self.rank] = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(message, group=self._group)
        return message.tolist()

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Say after a while that other ranks are missing, because a user may have made a call on one rank only."""
        if self._call in ("", STEP):
            yield
            return
        text = f"{self._call} waits for the other ranks. Call it on all ranks, not on rank {self.rank} alone"
        with after(PATIENCE_SECONDS, lambda: say(text)):
            yield

    def _fail(self, error: Exception) -> None:
        """Send an error of this rank. Return if all ranks have sent one of the same type from the same attempt.

        Raises:
            RankFailure: otherwise.
            _Unwinding: another rank has failed in an outer attempt.
        """
        kind = _number(f"{type(error).__module__}.{type(error).__qualname__}")
        rows = self._sent([self._level, kind, float(ran_out_of_memory(error))])
        failure = self._failure(rows, f"rank {self.rank}: {first_line(error)}")
        if all(row[:_FIRST] == rows[0][:_FIRST] for row in rows):
            return
        failure.__cause__ = error
        raise failure if failure.level == self._level else _Unwinding(failure)

    def _failure(self, rows: list[list[float]], text: str) -> RankFailure:
        """Return the failure of all ranks.

        Args:
            rows: the messages of all ranks.
            text: error of this rank; empty if it has not failed.
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
        with _lost():
            dist.all_gather_object(box, data, group=self._group)
        return box


def encoded(value: Any) -> bytes:
    """Return a value as bytes. Plain pickles, as of torch's collectives, cannot hold uint32 tensors (torch 2.14)."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def decoded(data: bytes) -> Any:
    """Return the value that ``encoded`` has turned into bytes, with tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _number(text: str) -> float:
    """Return a number that stands for a text."""
    return float(zlib.crc32(text.encode()))


@contextmanager
def _lost() -> Iterator[None]:
    """Turn the errors of a collective on the host into ``LostRank``."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # connection closed by peer, or timed out
        raise LostRank(f"another rank has ended, or does not answer: {first_line(error)}") from error

"""Delay of SIGTERM and Ctrl-C until a save is complete. Cluster schedulers send SIGTERM before SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Termination:
    """Context manager that delays SIGTERM and SIGINT.

    Inside the block the signals set ``asked``. After the block they take effect.

    A second SIGINT takes effect at once. Ignored signals stay ignored. Outside the main thread nothing changes, because
    Python handles signals only in the main thread.

    Attributes:
        asked: True after a signal has arrived.
    """

    def __init__(self) -> None:
        self.asked = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in _SIGNALS if in_main_thread}
        self._before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        self._to_obey: set[int] = set()
        self._process = os.getpid()

    @property
    def number(self) -> int:
        """Number of the signal that has arrived, or 0 before a signal."""
        return max(self._to_obey, default=0)

    def ask(self, number: int) -> None:
        """Treat a signal to another rank as a signal to this process."""
        self.asked = True
        if not self._to_obey:
            self._to_obey.add(number)

    def __enter__(self) -> Termination:
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in list(self._before):
            self._put_back(number)
        # The signal ends the process before Python shows the error. On several ranks, the hook also notifies the other
        # ranks, which may be blocked in a collective.
        if error is not None and signal.SIGTERM in self._to_obey:
            sys.excepthook(type(error), error, error.__traceback__)
        for number in _SIGNALS:
            if number in self._to_obey:
                signal.raise_signal(number)

    def _put_back(self, number: signal.Signals) -> None:
        handler = self._before.pop(number)
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_child = os.getpid() != self._process  # a child that was forked inside the block has nothing to save
        if is_child and number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        elif number == signal.SIGINT and number in self._to_obey:
            self._to_obey.remove(number)
            self._put_back(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        else:
            # A terminal also sends SIGINT to child processes. Workers continue, so that the step gets its batch.
            self.asked = True
            self._to_obey.add(number)
            if number == signal.SIGINT and not is_child:
                with contextlib.suppress(Exception):  # a failed print must not interrupt the step
                    print("flatout: saving behind this step; interrupt again to stop at once", file=sys.stderr)

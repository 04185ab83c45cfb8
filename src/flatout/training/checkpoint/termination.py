"""SIGTERM, as clusters' schedulers send it before they kill, and Ctrl-C: noted, and obeyed when training is saved."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Termination:
    """Inside the block SIGTERM and SIGINT set ``asked``; behind it they do what they would have done.

    A second SIGINT does that at once. Outside the main thread, where Python lets nobody handle signals, nothing is
    changed, and neither is a signal that is ignored.

    Attributes:
        asked: whether a signal has come.
    """

    def __init__(self) -> None:
        self.asked = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in _SIGNALS if in_main_thread}
        self._before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        self._to_obey: set[int] = set()
        self._process = os.getpid()

    def __enter__(self) -> Termination:
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in list(self._before):
            self._put_back(number)
        if error is not None and signal.SIGTERM in self._to_obey:  # nobody else is going to tell it
            traceback.print_exception(error)
        for number in _SIGNALS:
            if number in self._to_obey:
                signal.raise_signal(number)

    def _put_back(self, number: signal.Signals) -> None:
        handler = self._before.pop(number)
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_child = os.getpid() != self._process  # made inside the block: it has nothing to save
        if is_child and number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        elif number == signal.SIGINT and number in self._to_obey:
            self._to_obey.remove(number)
            self._put_back(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        else:
            # A terminal sends SIGINT to children, too: workers go on until the step has had its batch.
            self.asked = True
            self._to_obey.add(number)
            if number == signal.SIGINT and not is_child:
                with contextlib.suppress(Exception):  # in the middle of a step, where nothing may go wrong
                    print("flatout: saving behind this step; interrupt again to stop at once", file=sys.stderr)

"""SIGTERM, as schedulers of clusters send it before they kill: noted, and obeyed when training has been saved."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from types import FrameType, TracebackType


class Termination:
    """Inside the block SIGTERM sets ``asked``; behind it the signal does what it would have done.

    Outside the main thread, where Python lets nobody handle signals, and where SIGTERM is ignored, nothing is changed.

    Attributes:
        asked: whether the signal has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before = signal.getsignal(signal.SIGTERM)
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._handles = in_main_thread and self._before is not signal.SIG_IGN
        self._process = os.getpid()

    def __enter__(self) -> Termination:
        if self._handles:
            signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            if self.asked:
                if error is not None:  # nobody else is going to tell it
                    traceback.print_exception(error)
                os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.asked = True
        else:  # a child, made inside the block: it has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

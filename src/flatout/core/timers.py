"""Timer for a block that may take too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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

"""Progress of tuning: a live line for people, named ranges for profilers, and a log record for each technique."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator

from flatout.core import formatting
from flatout.report import wording
from flatout.report.model import Gain, Row
from flatout.tuning.budget import Budget
from flatout.tuning.ledger import Ledger
from flatout.tuning.live_line import LiveLine, live_line
from flatout.tuning.ranks import is_first_rank, world_size

REFRESH_SECONDS = 0.5
"""Least seconds between two refreshes of the line, which shows whole seconds."""

_log = logging.getLogger("flatout.tuning")


class Progress:
    """Live line with the current stage, its candidate, and the seconds of the budget.

    Stages and candidates draw the line when they begin. ``refresh`` updates the seconds, and is called outside timed
    regions. An error of the display removes the line, and tuning continues.

    Args:
        line: the line; None shows nothing.

    Attributes:
        budget: the budget to show, or None until tuning has chosen one.
    """

    def __init__(self, line: LiveLine | None = None) -> None:
        self.budget: Budget | None = None
        self._line = line
        self._stage = ""
        self._candidate = ""
        self._due = 0.0

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show a stage of tuning inside the block."""
        self._stage = what
        self._draw()
        try:
            yield
        finally:
            self._stage = ""
            self._draw()

    @contextlib.contextmanager
    def candidate(self, label: str) -> Iterator[None]:
        """Show a candidate beside the stage inside the block."""
        self._candidate = label
        self._draw()
        try:
            yield
        finally:
            self._candidate = ""

    def refresh(self) -> None:
        """Update the seconds, at most every ``REFRESH_SECONDS``."""
        # Simulations replace perf_counter, so this clock is a different one.
        if self._line is not None and time.monotonic() >= self._due:
            self._draw()

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Update the seconds from a thread inside the block, such as a compilation. The block must contain no pairs."""
        if self._line is None:
            yield
            return
        ended = threading.Event()
        # A copy of the context directs the updates to the running cell of a notebook.
        tick = threading.Thread(target=contextvars.copy_context().run, args=(self._tick, ended), daemon=True)
        tick.start()
        try:
            yield
        finally:
            ended.set()
            tick.join()

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(REFRESH_SECONDS):
            self._draw()

    def close(self, last: str = "") -> None:
        """Remove the line permanently. In a notebook, ``last`` replaces the line."""
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(Exception):
                line.close(last)

    def _draw(self) -> None:
        line = self._line
        if line is None:
            return
        self._due = time.monotonic() + REFRESH_SECONDS
        try:
            if self._stage:
                line.show(self._text())
            else:
                line.hide()
        except Exception:  # the terminal or the notebook may raise anything
            self.close()

    def _text(self) -> str:
        stage = f"{self._stage}: {self._candidate}" if self._candidate else self._stage
        text = formatting.clean(f"flatout: {' '.join(stage.split())}")
        return text if self.budget is None else f"{text} · {self.budget.shown:.0f} of {self.budget.seconds:.0f} s"


def own_progress() -> Progress:
    """Return the progress of this process. Only the first rank, or a process that trains alone, shows a line."""
    is_alone = world_size() == 1 and multiprocessing.parent_process() is None
    try:
        return Progress(live_line() if is_alone or (world_size() > 1 and is_first_rank()) else None)
    except Exception:  # standard error may be an unusual stream
        return Progress()


@contextlib.contextmanager
def logged(ledger: Ledger, is_on: bool) -> Iterator[None]:
    """Log a record for each technique that is decided inside the block. Other ranks than the first log nothing."""
    if not (is_on and _log.isEnabledFor(logging.INFO) and is_first_rank()):
        yield
        return
    earlier, begun = {row.technique: row for row in ledger.rows}, time.monotonic()
    yield
    rows = [row for row in ledger.rows if row is not earlier.get(row.technique)]
    took = formatting.seconds(time.monotonic() - begun)
    for row in rows:
        _log.info("%s, %s%s", _decision(row), took, f" for {len(rows)} techniques" if len(rows) > 1 else "")


def log(text: str, is_on: bool) -> None:
    """Log a record about the session. Other ranks than the first log nothing."""
    if is_on and is_first_rank():
        _log.info("%s", text)


def _decision(row: Row) -> str:
    """Return a decision as text, such as ``mixed precision: kept bf16, +41 % (+38 … +44 %)``."""
    chosen = formatting.clean(row.chosen)
    status = f"{row.status} {chosen}" if chosen else row.status
    return ", ".join([f"{formatting.clean(row.title)}: {status}", *gain_of(row.gain, row.gain_pairs)])


def gain_of(gain: Gain | None, pairs: int | None = None) -> list[str]:
    """Return a gain with its interval, in a list of one; empty without a gain."""
    return [] if gain is None else [f"{formatting.percent(gain.ratio)} ({wording.interval(gain, pairs)})"]

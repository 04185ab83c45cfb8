"""Progress of tuning: a live line for people, named ranges for profilers, and a log record for each technique.

Only a call draws the line, because the threads that redraw rich's live displays would disturb timed steps. rich also
holds back unfinished lines of other output, and requires ipywidgets in a notebook.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from flatout.core import formatting
from flatout.core.standard_error import can_replace_lines, wants_progress
from flatout.report import wording
from flatout.report.model import Gain, Row
from flatout.tuning.budget import Budget
from flatout.tuning.ledger import Ledger
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

    def __init__(self, line: NotebookLine | TerminalLine | LogLines | None = None) -> None:
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


_ERASE = "\r\x1b[2K"
"""Control sequence: carriage return, and "erase in line" of ECMA-48."""


def live_line() -> NotebookLine | TerminalLine | LogLines | None:
    """Return a line below the cell of a notebook or at the terminal of standard error; None without either.

    ``FLATOUT_PROGRESS=0`` shows no line. ``FLATOUT_PROGRESS=1`` shows lines of a log where no line can be replaced.
    rich recognizes Jupyter, VS Code, Colab and Databricks by IPython's class of shell. A fork of a notebook's kernel
    cannot send output.
    """
    stream, is_wanted = sys.stderr, wants_progress()
    if (
        is_wanted is False
        or stream is None
        or hasattr(stream, "rich_proxied_file")
        or isinstance(stream, _SharedStream)
    ):
        return None  # another live line uses the terminal
    from flatout.report.terminal import Console  # slow to import

    console = Console(file=stream)
    if console.is_jupyter:
        return NotebookLine() if multiprocessing.parent_process() is None else None
    if can_replace_lines(console):
        return TerminalLine(stream)
    return LogLines(stream) if is_wanted else None


class NotebookLine:
    """Output of a cell that is replaced in place.

    Widgets would require ipywidgets, and would leave no text in a saved notebook. Output is never removed, because this
    would also remove the user's output.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._text = ""

    def show(self, text: str) -> None:
        """Replace the output by ``text``."""
        if text == self._text:
            return
        self._text, data = text, {"text/plain": text}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def hide(self) -> None:
        """Do nothing, because other output has separate lines."""

    def close(self, last: str) -> None:
        """Replace the output by ``last``, if there is any."""
        if self._handle is not None:
            self.show(last)


LOG_SECONDS = 2.0
"""Least seconds between two lines of a log. A stage that ends earlier has no line."""


class LogLines:
    """Lines of a log, for a stream whose lines cannot be replaced. Each long stage or candidate writes one line.

    Args:
        stream: standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage = ""
        self._due = 0.0

    def show(self, text: str) -> None:
        """Write ``text``, unless only its seconds are new or a line was written just now."""
        stage, now = text.partition(" · ")[0], time.monotonic()
        if stage != self._stage and now >= self._due:
            self._stage, self._due = stage, now + LOG_SECONDS
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def hide(self) -> None:
        """Do nothing, because each line is complete."""

    def close(self, last: str) -> None:
        """Do nothing, because lines of a log stay."""


class TerminalLine:
    """Last line of a terminal.

    ``print``, warnings and other writes to ``sys.stdout`` and ``sys.stderr`` appear above the line. The cursor waits at
    the start of the line, so that other output covers it.

    Args:
        stream: standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        from flatout.report.terminal import Console

        self._stream = stream
        self._console = Console(file=stream)
        self._is_ascii = not self._console.encoding.startswith("utf")
        self._pid = os.getpid()
        self._text = ""
        self._visible = ""
        self._is_other_line_open = False
        self._replaced: dict[str, tuple[TextIO, _SharedStream]] = {}
        for name in ("stdout", "stderr"):
            own = getattr(sys, name)
            if own is not None and own.isatty():
                self._replaced[name] = own, _SharedStream(own, self)
                setattr(sys, name, self._replaced[name][1])

    def show(self, text: str) -> None:
        """Replace the line by ``text``, cut to the terminal's width. An unfinished line of other output stays."""
        from flatout.report.terminal import say

        line = say(text, self._is_ascii)
        line.truncate(self._console.width - 1, overflow="ellipsis")
        self._text = line.plain
        self._draw()

    def hide(self) -> None:
        """Remove the line until the next ``show``."""
        self._text = ""
        self.erase()

    def close(self, last: str) -> None:
        """Remove the line, and restore the streams."""
        self.hide()
        for name, (own, shared) in self._replaced.items():
            if getattr(sys, name) is shared:
                setattr(sys, name, own)

    def erase(self) -> None:
        """Remove the line before other output."""
        if self._visible:
            self._visible = ""
            self._write(_ERASE)

    def redraw(self, *, is_other_line_open: bool) -> None:
        """Show the line again after other output."""
        self._is_other_line_open = is_other_line_open
        self._draw()

    def _draw(self) -> None:
        if self._text != self._visible and not self._is_other_line_open:
            self._visible = self._text
            self._write(f"{_ERASE}{self._text}\r")

    def _write(self, text: str) -> None:
        if os.getpid() != self._pid:  # a fork, such as a loader's worker, may live longer than the line
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._stream.write(text)
            self._stream.flush()


class _SharedStream:
    """Stream to the terminal of a line. Its output appears above the line.

    Args:
        stream: the stream.
        line: the line.
    """

    def __init__(self, stream: TextIO, line: TerminalLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        if not text:
            return 0
        self._line.erase()
        written = self._stream.write(text)
        self._line.redraw(is_other_line_open=not text.endswith("\n"))
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

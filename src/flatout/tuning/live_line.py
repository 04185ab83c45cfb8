"""Line of text that is replaced in place, at a terminal or below the cell of a notebook.

Only a call draws the line, because the threads that redraw rich's live displays would disturb timed steps.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol, TextIO

from rich.console import Console

from flatout.core.standard_error import can_replace_lines, wants_progress
from flatout.report.document import say

_ERASE = "\r\x1b[2K"
"""Control sequence: carriage return, and "erase in line" of ECMA-48."""


class LiveLine(Protocol):
    """Line of text that is replaced in place."""

    def show(self, text: str) -> None:
        """Replace the line by ``text``."""

    def hide(self) -> None:
        """Remove the line until the next ``show``, if other output would share the line."""

    def close(self, last: str) -> None:
        """Remove the line permanently. A line that cannot be removed is replaced by ``last``."""


def live_line() -> LiveLine | None:
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

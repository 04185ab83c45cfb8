"""Pseudo-terminal of this process, and the contents of its screen."""

from __future__ import annotations

import os
import re
import sys
import termios
import threading
import tty
from types import TracebackType
from typing import TextIO

_PARTS = re.compile(r"\x1b\[2K|\r|\n|[^\x1b\r\n]+")


def screen(text: str) -> list[str]:
    """Return the lines of a screen after ``text``, which moves within a line and erases whole lines."""
    lines, column = [""], 0
    for part in _PARTS.findall(text):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[-1] = ""
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
    assert "\x1b" not in "".join(_PARTS.sub("", text)), "an unknown control sequence"
    return lines


class Terminal:
    """Pseudo-terminal that replaces standard output and standard error inside the block.

    Attributes:
        streams: replacements of ``sys.stdout`` and ``sys.stderr``.
        written: everything that was written, after the block.
    """

    def __enter__(self) -> Terminal:
        self.written = ""
        self._master, slave = os.openpty()
        tty.setraw(slave)
        attributes = termios.tcgetattr(slave)
        attributes[1] |= termios.OPOST | termios.ONLCR
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        self.streams: list[TextIO] = [
            os.fdopen(fd, "w", buffering=1, encoding="utf-8") for fd in (slave, os.dup(slave))
        ]
        self._own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self.streams
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.stdout, sys.stderr = self._own
        for stream in self.streams:
            stream.close()
        self._reader.join()
        os.close(self._master)

    def _read(self) -> None:
        read = b""
        while True:
            try:
                chunk = os.read(self._master, 65536)
            except OSError:  # all writers are gone
                chunk = b""
            if not chunk:
                self.written = read.decode()
                return
            read += chunk

    @property
    def frames(self) -> list[str]:
        """Texts that the live line showed, in order, after the block."""
        return re.findall(r"\x1b\[2K(flatout[^\r]*)\r", self.written)

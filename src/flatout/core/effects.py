"""Effects of a user's code outside of memory: printing, logging, files and other processes.

Trials run the user's step, and drop what this step prints and logs. A step that writes files, talks to other processes
or consumes an iterator cannot be repeated without a trace, so such a step must not be tried.
"""

from __future__ import annotations

import builtins
import collections.abc
import contextlib
import io
import logging
import os
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.core.reachable import is_users
from flatout.core.replaced import replaced
from flatout.core.saved import has_position

_TOOLS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.utils.data", "triton", "importlib")
"""Packages that write files and start processes of their own, to compile and to load data."""

_CHANNELS = (
    socket.socket,
    threading.Thread,
    threading.Condition,  # of an Event, too: a copy that is written back would lose the threads that wait
    queue.Queue,
    queue.SimpleQueue,
    sqlite3.Connection,
    sqlite3.Cursor,
    subprocess.Popen,
    _BaseDataLoaderIter,
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Unrepeatable(RuntimeError):
    """Error of a step that cannot be repeated without a trace. The message is one clause for the report."""


def why_not_repeated(nodes: Iterable[Any], who: str = "the step") -> str:
    """Return why code that reaches these objects cannot be repeated without a trace; empty if no reason is seen.

    Args:
        nodes: the objects.
        who: the code, as the subject of the clause.
    """
    for node in nodes:
        kind = type(node)
        if issubclass(kind, io.IOBase) and not node.closed and node.writable():
            return f"{who} reaches a file that is open for writing, {getattr(node, 'name', kind.__name__)!r}"
        if issubclass(kind, _CHANNELS):
            return f"{who} reaches a {kind.__module__}.{kind.__name__}, which a repetition could not restore"
        is_moving = not has_position(node) if isinstance(node, io.IOBase) else _is_unfinished_iterator(node)
        if is_moving:
            return f"{who} reaches a {kind.__name__}, whose position a repetition could not restore"
    return ""


def _is_unfinished_iterator(node: Any) -> bool:
    if not isinstance(node, collections.abc.Iterator) or getattr(node, "gi_frame", node) is None:
        return False
    if hasattr(node, "__dict__"):  # of a class in Python, whose attributes are restored
        return False
    left: Callable[[], int] | None = getattr(node, "__length_hint__", None)
    return left is None or left() > 0


_contained: list[Containment] = []


class Containment:
    """Containment of a user's code in trials.

    Attributes:
        error: the error that a forbidden effect has raised, or None. User code may have caught it.
    """

    def __init__(self) -> None:
        self.error: Unrepeatable | None = None
        self._process, self._thread = os.getpid(), threading.get_ident()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Drop what user code prints and logs inside the block, and forbid other effects.

        Raises:
            Unrepeatable: user code is about to write a file, connect a socket, or start a process.
        """
        if _contained:  # an inner block
            yield
            return
        _contained.append(self)
        with contextlib.ExitStack() as stack:
            stack.callback(_contained.clear)
            for name in ("stdout", "stderr"):
                if getattr(sys, name) is not None:
                    stack.enter_context(replaced(sys, name, partial(_Silent, containment=self)))
            stack.enter_context(replaced(logging.Logger, "callHandlers", self._heard))
            for owner, name, target in _WRITERS:
                stack.enter_context(replaced(owner, name, partial(self._checked, target=target)))
            yield

    def holds(self) -> bool:
        """Return True in the process and thread of the trials, and in threads that Python has not started.

        A backward for a GPU calls hooks in such threads. Workers are forked with this containment, and are free.
        """
        thread = threading.get_ident()
        if os.getpid() != self._process:
            return False
        return thread == self._thread or type(threading._active.get(thread)) in (type(None), threading._DummyThread)  # type: ignore[attr-defined]

    def _heard(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def callHandlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] == "flatout" or not self.holds():
                handle(logger, record)

        return callHandlers

    def _checked(self, function: Callable[..., Any], target: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is forbidden to user code if ``target`` of its arguments is not None."""

        def checked(*args: Any, **kwargs: Any) -> Any:
            written = target(*args, **kwargs)
            if written is not None and self.holds() and _is_called_by_step():
                self.error = Unrepeatable(f"the script writes to {written!r}, which a repetition could not restore")
                raise self.error
            return function(*args, **kwargs)

        return checked


class _Silent:
    """Stream that drops the text of user code. Warnings pass, because Python shows each of them only once."""

    def __init__(self, stream: Any, containment: Containment) -> None:
        self._stream = stream
        self._containment = containment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def write(self, text: str) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller in ("warnings", "flatout.core.standard_error") or not self._containment.holds():
            return self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _is_called_by_step() -> bool:
    """Return True if user code, or a library that the step calls, is nearer to the call than a tool or flatout."""
    frame, library = sys._getframe(2), False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if is_users(module):
            return True
        if package == "flatout" or module.startswith(_TOOLS):
            return library and package == "flatout"
        library |= package not in sys.stdlib_module_names and package != "torch"
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _names_written_file(file: Any, mode: str = "r", *_: Any, **__: Any) -> Any:
    return file if set(mode) & set("wax+") and file != os.devnull else None


def _names_written_descriptor(path: Any, flags: int, *_: Any, **__: Any) -> Any:
    return path if flags & _WRITES else None


def _first(path: Any = "", *_: Any, **__: Any) -> Any:
    return path


def _second(_: Any, path: Any = "", *__: Any, **___: Any) -> Any:
    return path


_WRITERS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (builtins, "open", _names_written_file),
    (io, "open", _names_written_file),
    (os, "open", _names_written_descriptor),
    *((os, name, _first) for name in ("remove", "unlink", "rename", "replace", "mkdir", "rmdir")),
    (torch, "save", _second),
    (subprocess.Popen, "__init__", _second),
    (sqlite3, "connect", _first),
    (socket.socket, "connect", _second),
)
"""Functions that have effects outside of memory: owner, attribute, and what a call writes or None."""

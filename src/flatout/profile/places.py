"""Whose code a frame is: places are ``file:line`` of the user's code, the file as torch's profiler shortens it."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+)(?: \(.+\))?")
_NOT_THE_USERS = {"torch", "functorch", "flatout", "numpy", "triton"}
_ROOTS = tuple(os.path.dirname(os.path.dirname(file)) for file in (torch.__file__, os.path.dirname(__file__)))
"""Folders that hold the packages torch and flatout; an editable install is not on ``sys.path``."""


def short(filename: str) -> str:
    """A file's path without the longest entry of ``sys.path`` that it begins with, as torch's profiler writes it."""
    folders = (folder.rstrip(os.sep) + os.sep for folder in (*sys.path, *_ROOTS) if folder)
    return filename[max((len(folder) for folder in folders if filename.startswith(folder)), default=0) :]


def is_users(file: str) -> bool:
    """Whether a shortened path is code that somebody here can change: neither torch's, flatout's nor Python's own."""
    if file.startswith("<") or "torchinductor_" in file:  # <string>, <built-in ...>; code that torch.compile wrote
        return False
    if file == short(_main_file()):  # may have the name of a module of Python's
        return True
    top = short(file).split(os.sep)[0].removesuffix(".py")
    return top not in _NOT_THE_USERS and top not in sys.stdlib_module_names


def outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
    """A frame, the one that called it, and so on, each with its shortened file."""
    while frame is not None:
        yield frame, short(frame.f_code.co_filename)
        frame = frame.f_back


def of_frame(frame: FrameType | None) -> tuple[str, str]:
    """The innermost place of the user's code, from ``frame`` outwards, and its line of code; empty where none is."""
    for at, file in outwards(frame):
        if is_users(file):
            return f"{file}:{at.f_lineno}", linecache.getline(at.f_code.co_filename, at.f_lineno).strip()
    return "", ""


def code_at(place: str) -> str:
    """The line of code at ``file:line`` or ``file:line (name)``; empty where it cannot be read."""
    found = _PLACE.fullmatch(place)
    return "" if found is None else linecache.getline(found["file"], int(found["line"])).strip()


def _main_file() -> str:
    return getattr(sys.modules.get("__main__"), "__file__", None) or "<none>"

"""Places in the user's code, as ``file:line``. Paths of files are shortened as in torch's profiler."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_NOT_THE_USERS = {"torch", "functorch", "flatout", "numpy", "triton"}
_ROOTS = tuple(os.path.dirname(os.path.dirname(file)) for file in (torch.__file__, os.path.dirname(__file__)))
"""Folders that hold the packages torch and flatout. An editable install is not on ``sys.path``."""


LOOP = "flatout/profile/record.py", "profile_run"
"""File and name of the function that runs the steps of a profile. Its callers are no part of a step."""


def short(filename: str) -> str:
    """Return a file's path without its longest prefix from ``sys.path``, as torch's profiler does."""
    folders = (folder.rstrip(os.sep) + os.sep for folder in (*sys.path, *_ROOTS) if folder)
    return filename[max((len(folder) for folder in folders if filename.startswith(folder)), default=0) :]


def is_users(file: str) -> bool:
    """Return True if a shortened path counts as the user's code.

    Generated code does not count, nor does code of torch, functorch, flatout, numpy, triton or Python's library.
    """
    if file.startswith("<") or "torchinductor_" in file:  # <string>, <built-in ...>, or code that torch.compile wrote
        return False
    if file == short(_main_file()):  # a script may have the name of a module of Python's library
        return True
    top = short(file).split(os.sep)[0].removesuffix(".py")
    return top not in _NOT_THE_USERS and top not in sys.stdlib_module_names


def outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
    """Yield a frame and its callers, innermost first, each with its shortened file."""
    while frame is not None:
        yield frame, short(frame.f_code.co_filename)
        frame = frame.f_back


def of_frame(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost place of the user's code from ``frame`` outwards, and its line of code; empty if none.

    The search ends at the loop of a profile.
    """
    for at, file in outwards(frame):
        if (file, at.f_code.co_name) == LOOP:
            break
        if is_users(file):
            return f"{file}:{at.f_lineno}", linecache.getline(at.f_code.co_filename, at.f_lineno).strip()
    return "", ""


def _main_file() -> str:
    return getattr(sys.modules.get("__main__"), "__file__", None) or "<none>"

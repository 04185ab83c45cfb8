"""Whose code runs in a frame, where that is, and how what it belongs to is called."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch

_MOST = 10_000  # objects looked at on the way to a transform
_WIDTH = 64  # elements looked at in one container: transforms are few, file names many


@dataclass(frozen=True)
class Place:
    """Where an operation comes from.

    Attributes:
        file: of the innermost frame that is the user's own code, ``"Cell In[3]"`` in a notebook; None where all
            frames are a library's.
        line: the line of ``file`` that runs.
        way: how the library's transform is reached where no frame is the user's, such as
            ``"dataset.transform.transforms[2]"``.
        what: the class of a library's transform, or the function.
    """

    file: str | None
    line: int | None
    way: str | None
    what: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line}" if self.file is not None else str(self.way)


class Places:
    """Tells places, and remembers the ways to transforms.

    Args:
        roots: what a library's transform may be reached from, by name: the dataset.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._ways: dict[int, str | None] = {}

    def of(self, frames: Sequence[FrameType]) -> Place | None:
        """Where an operation comes from that ``frames`` led to, innermost first; None when that cannot be told."""
        own = next((i for i, frame in enumerate(frames) if is_own(frame)), None)
        inner = frames[:own]
        transform = next((t for t in map(transform_of, inner) if t is not None), None)
        if own is None:
            way = None if transform is None else self._way_to(transform)
            return None if way is None else Place(None, None, way, _public_name(type(transform)))
        code = frames[own].f_code
        library = [frame for frame in inner if not _is_torch(frame.f_code)]
        if transform is not None:
            what = _public_name(type(transform))
        elif library:
            what = f"{library[-1].f_globals.get('__name__', '?')}.{library[-1].f_code.co_name}"
        else:
            what = _qualified(code)
        return Place(_shown(code.co_filename), frames[own].f_lineno, None, what)

    def _way_to(self, transform: Any) -> str | None:
        if id(transform) not in self._ways:
            self._ways[id(transform)] = _way(transform, self._roots)
        return self._ways[id(transform)]


def is_own(frame: FrameType) -> bool:
    """Whether the code of ``frame`` is the user's: no installed library, not the standard library, not torch."""
    filename = frame.f_code.co_filename
    if filename.startswith("<"):  # typed in, or made by exec
        return frame.f_globals.get("__name__") == "__main__" or filename.startswith("<ipython-input")
    return _is_own_file(filename)


def transform_of(frame: FrameType) -> Any:
    """The callable object whose method runs in ``frame``, such as a transform; None where there is none."""
    owner = owner_of(frame)
    is_method = hasattr(type(owner), frame.f_code.co_name)
    return owner if is_method and callable(owner) and not isinstance(owner, (type, torch.Tensor)) else None


def owner_of(frame: FrameType) -> Any:
    """The first argument of the function in ``frame``: ``self`` in a method; None where there is none."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def package_of(instance: Any) -> str:
    """The top-level package that the class of ``instance`` is defined in."""
    return str(type(instance).__module__).partition(".")[0]


@functools.cache
def _is_own_file(filename: str) -> bool:
    path = os.path.abspath(filename)
    return not {"site-packages", "dist-packages"} & set(path.split(os.sep)) and not path.startswith(_libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the user's, wherever it is installed."""
    flatout = os.path.dirname(os.path.dirname(__file__))
    folders = [flatout, _folder(torch), _folder(np), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return tuple(os.path.join(folder, "") for folder in folders)


def _folder(package: ModuleType) -> str:
    return os.path.dirname(str(package.__file__))


def _is_torch(code: CodeType) -> bool:
    return code.co_filename.startswith(os.path.join(_folder(torch), ""))


def _qualified(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]  # co_qualname: Python 3.11


def _public_name(kind: type) -> str:
    """The shortest name that ``kind`` can be imported by: ``torchvision.transforms.Normalize``."""
    parts = kind.__module__.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), kind.__qualname__, None) is kind:
            return f"{module}.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _shown(filename: str) -> str:
    """The file as its author knows it: a notebook's cells are files in a temporary folder."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    known = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(filename)
    return filename if known is None else " ".join(known)


def _short(file: str | None) -> str:
    """Relative to the current folder where the file lies below it."""
    assert file is not None
    below = os.path.join(os.getcwd(), "")
    return file.removeprefix(below)


def _way(target: Any, roots: Mapping[str, Any]) -> str | None:
    """The shortest way to ``target`` by attributes and elements: ``dataset.transform.transforms[2]``."""
    left = deque(roots.items())
    seen: set[int] = set()
    while left and len(seen) < _MOST:
        way, node = left.popleft()
        if node is target:
            return way
        if id(node) not in seen:
            seen.add(id(node))
            left.extend((way + step, child) for step, child in _steps(node))
    return None


def _steps(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, (str, bytes, torch.Tensor, np.ndarray, type)):
        return
    if isinstance(node, Mapping):
        yield from ((f"[{key!r}]", node[key]) for key, _ in zip(node, range(_WIDTH), strict=False))
    elif isinstance(node, (list, tuple)):
        yield from ((f"[{i}]", child) for i, child in enumerate(node[:_WIDTH]))
    else:
        yield from ((f".{name}", child) for name, child in getattr(node, "__dict__", {}).items())

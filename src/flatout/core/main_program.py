"""Python program that runs in this process as ``python`` itself would run it.

``runpy`` restores ``sys.modules["__main__"]`` after the program's last line. Threads that still run and ``atexit``
functions then find another ``__main__``, and cannot pickle the program's classes. In this file the program stays
``__main__``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


class MainProgram(ABC):
    """Program that becomes the process's ``__main__``.

    Args:
        name: path or module name, as typed.
        args: the program's arguments.

    Attributes:
        module: the program's ``__main__``.
    """

    def __init__(self, name: str, args: Sequence[str]) -> None:
        self.module = ModuleType("__main__")
        self._name = name
        self._args = list(args)

    def run(self) -> None:
        """Run the program to its end. ``sys.argv``, ``sys.path[0]`` and ``sys.modules["__main__"]`` stay changed.

        Spawned child processes run the program by its path or module name, without this call.

        Raises:
            BaseException: the exception that the program raises, ``SystemExit`` included. The interpreter shows its
                traceback from the program's first frame on.
        """
        sys.modules["__main__"] = self.module
        sys.argv[:] = [self._name, *self._args]
        vars(self.module)["__builtins__"] = sys.modules["builtins"]
        try:
            code = self._load()
            exec(code, vars(self.module))
        except SystemExit:
            raise
        except BaseException:
            self._hide_callers()
            raise

    @abstractmethod
    def _load(self) -> CodeType:
        """Set ``sys.path[0]`` and the attributes of the module, and return the program's code."""

    def _describe(self, **attributes: Any) -> None:
        """Set attributes of the module, such as ``file`` for ``__file__``."""
        vars(self.module).update({f"__{name}__": value for name, value in attributes.items()})

    def own(self, traceback: TracebackType | None) -> TracebackType | None:
        """Return the part of a traceback that begins in the program, or None without such a part."""
        while traceback is not None and traceback.tb_frame.f_globals is not vars(self.module):
            traceback = traceback.tb_next
        return traceback

    def _hide_callers(self) -> None:
        """Make ``sys.excepthook``, which the program may have replaced, show the program's own frames only."""
        show = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            own = self.own(traceback)
            show(kind, error.with_traceback(own), own)

        sys.excepthook = excepthook


class MainFile(MainProgram):
    """Script, or a folder or archive with a ``__main__.py``."""

    def _load(self) -> CodeType:
        path = os.path.abspath(self._name)
        if os.path.isdir(path) or not _is_source(path):
            return self._load_from(path)
        _set_first_folder(os.path.dirname(os.path.realpath(path)))
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        self._describe(file=path, loader=loader, package=None, spec=None, cached=None)
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)

    def _load_from(self, place: str) -> CodeType:
        """Return the code of the ``__main__.py`` in a folder or an archive."""
        _set_first_folder(place, is_safe=True)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [place])
        if spec is None or spec.loader is None:
            raise ImportError(f"can't find '__main__' module in {self._name!r}", name="__main__", path=place)
        self._describe(file=spec.origin, loader=spec.loader, package="", spec=spec, cached=spec.cached)
        return _code_of(spec)


class MainModule(MainProgram):
    """Module or package, as for ``python -m``."""

    def _load(self) -> CodeType:
        _set_first_folder(os.getcwd())
        sys.argv[0] = "-m"  # Python, too, sets this while it imports the parent packages
        spec = _spec_of(self._name)
        sys.argv[0] = spec.origin or self._name
        self._describe(file=spec.origin, loader=spec.loader, package=spec.parent, spec=spec, cached=spec.cached)
        return _code_of(spec)


def _spec_of(name: str) -> importlib.machinery.ModuleSpec:
    """Return the spec of a module to run. For a package, return the spec of its ``__main__``.

    Raises:
        ImportError: there is no such module, or the package has no ``__main__``.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return _spec_of(f"{name}.__main__")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    return spec


def _code_of(spec: importlib.machinery.ModuleSpec) -> CodeType:
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        raise ImportError(f"No code object available for {spec.name}", name=spec.name)
    return code


def _is_source(path: str) -> bool:
    """Return False for archives. An archive may begin with any bytes, because its table of files is at the end."""
    return not zipfile.is_zipfile(path)


def _set_first_folder(folder: str, *, is_safe: bool = False) -> None:
    """Replace the first entry of ``sys.path``, which is the folder of the running command.

    Args:
        folder: the folder.
        is_safe: True for a folder that ``python -P`` and ``python -I`` search, too.
    """
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and newer
        sys.path[0] = folder
    elif is_safe:
        sys.path.insert(0, folder)

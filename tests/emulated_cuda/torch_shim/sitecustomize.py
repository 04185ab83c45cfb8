"""Emulated devices and flatout's build for them, in every process with this folder on its Python path."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

BUILD, SOURCES = Path(os.environ["EMULATED_CUDA_BUILD"]), Path(__file__).parents[3] / "src"


class FlatoutFinder:
    """Finder of flatout's sources in this checkout, and of the native core in the build.

    An installed flatout is never imported.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name == "flatout.native._host":
            return importlib.util.spec_from_file_location(name, next(BUILD.glob("_host*.so")))
        if name == "flatout":
            return PathFinder.find_spec(name, [str(SOURCES)])
        return PathFinder.find_spec(name, path) if name.startswith("flatout.") else None


def replace_kernels() -> None:
    """Replace the CUDA kernels of torch."""
    import operators
    import torch  # noqa: F401  its libraries must be loaded first

    library = ctypes.CDLL(str(BUILD / "tests" / "emulated_cuda" / "libemulated_aten.so"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each replaced kernel
        library.emulated_cuda_replace_kernels()
        operators.register()


sys.meta_path.insert(0, FlatoutFinder)  # type: ignore[arg-type]
replace_kernels()

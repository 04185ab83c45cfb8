"""Gives every process that finds this folder on its path the emulated devices, and flatout's build for them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

BUILD = Path(os.environ["EMULATED_CUDA_BUILD"])


class NativeCore:
    """Finds flatout's native core in the build."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "flatout.native._host":
            return None
        return importlib.util.spec_from_file_location(name, next(BUILD.glob("_host*.so")))


def replace_kernels() -> None:
    """Replace the CUDA kernels of torch."""
    import operators
    import torch  # noqa: F401  its libraries must be loaded first

    library = ctypes.CDLL(str(BUILD / "tests" / "emulated_cuda" / "libemulated_aten.so"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each replaced kernel
        library.emulated_cuda_replace_kernels()
        operators.register()


sys.meta_path.insert(0, NativeCore)  # type: ignore[arg-type]
replace_kernels()

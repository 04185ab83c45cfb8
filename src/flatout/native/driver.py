"""Comparison of the NVIDIA driver with the CUDA runtime that flatout was built with."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

from flatout.native import _host


@dataclass(frozen=True)
class OldDriver:
    """Driver that is too old for flatout's CUDA kernels.

    Attributes:
        supports: newest CUDA version that the driver supports, such as ``"12.4"``.
        built_with: CUDA version that flatout was built with.
        fix: the remedy, as part of a sentence.
    """

    supports: str
    built_with: str
    fix: str


def built_for_cuda() -> str:
    """Return the CUDA version that flatout was built with, such as ``"13.0"``."""
    return _text(_host.cuda_versions()[1])


def old_driver() -> OldDriver | None:
    """Return the driver if it is too old for flatout's CUDA kernels; None if it is new enough or not installed."""
    driver, runtime = _host.cuda_versions()
    needed = _host.needed_driver(runtime)
    if driver == 0 or runtime == 0 or driver >= needed:
        return None
    fix = f"install a driver for CUDA {_text(needed)} or newer"
    if driver >= _host.needed_driver(driver):  # a toolkit of the driver's major version suffices
        fix += f", or build flatout with a CUDA {driver // 1000} toolkit"
    return OldDriver(_text(driver), _text(runtime), fix)


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def warn_of_old_driver() -> None:
    """Warn if the driver is too old for flatout's CUDA kernels, once per process."""
    old = old_driver()
    if old is not None:
        warnings.warn(
            f"flatout falls back to torch's operations, because the NVIDIA driver supports CUDA {old.supports} and "
            f"flatout was built with CUDA {old.built_with}. To get flatout's CUDA kernels, {old.fix}.",
            RuntimeWarning,
            stacklevel=3,
        )

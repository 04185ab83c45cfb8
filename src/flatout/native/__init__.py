"""Native core: ``torch.ops.flatout.*`` and the torch-free classes of ``flatout.native._host``."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from pathlib import Path

import torch

OLDEST_TORCH = (2, 11)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if _torch_version() < OLDEST_TORCH:
    raise ImportError(
        f"flatout needs torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, found torch {torch.__version__}: "
        "pip install --upgrade torch"
    )


def _operators() -> Path:
    """Return the path of the operator library, in the folder of ``_host``.

    In an editable install, both are outside of this folder.
    """
    spec = importlib.util.find_spec("flatout.native._host")
    if spec is None or spec.origin is None:
        raise ImportError("flatout's native core is not built: run `pip install .` in its source folder")
    return Path(spec.origin).with_name("_C.so")


torch.ops.load_library(str(_operators()))

# These imports follow that of torch, whose libraries must be loaded first. The fakes need the operators.
from flatout.native import _host, fakes  # noqa: E402, F401
from flatout.native.driver import OldDriver, built_for_cuda, old_driver, warn_of_old_driver  # noqa: E402

BUILT_WITH_CUDA: bool = _host.built_with_cuda
"""True if this build has CUDA kernels."""


if not BUILT_WITH_CUDA and torch.version.cuda is not None and torch.cuda.is_available():
    # Once per process, because a module is imported once.
    warnings.warn(
        "flatout was built without CUDA kernels, so on this GPU it falls back on torch's own: "
        f"set CUDA_HOME to a CUDA {torch.version.cuda.split('.')[0]} toolkit with nvcc and run "
        "`pip install --force-reinstall --no-deps .` in flatout's source folder",
        RuntimeWarning,
        stacklevel=2,
    )


def has_cuda_kernels(device: int | None = None) -> bool:
    """Return True if this build has CUDA kernels that run on a device with its driver.

    Warns once per process if the driver is too old.

    Args:
        device: index of a GPU; default: the current one.
    """
    if device is None and torch.cuda.is_available():
        device = torch.cuda.current_device()
    if device is not None and _kernels_run(device):
        return True
    warn_of_old_driver()
    return False


@functools.cache
def _kernels_run(device: int) -> bool:
    return BUILT_WITH_CUDA and torch.cuda.is_available() and bool(torch.ops.flatout.cuda_kernels_run(device))


def has_cuda_runtime() -> bool:
    """Return True if flatout's CUDA runtime works with the driver, as native copies and streams require.

    Warns once per process if the driver is too old.
    """
    is_usable = _host.cuda_usable()
    if not is_usable:
        warn_of_old_driver()
    return is_usable


__all__ = ["BUILT_WITH_CUDA", "OldDriver", "built_for_cuda", "has_cuda_kernels", "has_cuda_runtime", "old_driver"]

"""PEP 517 backend: scikit-build-core, with torch as a build requirement only if torch is not installed.

With build isolation, a plain ``requires = ["torch"]`` would download the newest torch, although the user has one. The
native core is built against LibTorch's stable ABI. So the headers of any torch >= 2.11 are sufficient, and the user's
own torch needs no download.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from scikit_build_core import build as _backend
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _torch_requirement() -> list[str]:
    """Return a requirement of torch, unless the interpreter that runs pip has torch.

    ``-I`` drops the PYTHONPATH with which pip isolates a build, so the user's own packages are visible.
    """
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    found = subprocess.run([sys.executable, "-I", "-c", probe]).returncode == 0
    return [] if found else ["torch>=2.11"]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return the requirements of scikit-build-core, and torch if it is not installed."""
    return [*_backend.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return the requirements of scikit-build-core, and torch if it is not installed."""
    return [*_backend.get_requires_for_build_editable(config_settings), *_torch_requirement()]

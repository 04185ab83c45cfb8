"""PEP 517 backend: scikit-build-core, plus torch as a build requirement only where none is installed.

A plain ``requires = ["torch"]`` would download the newest torch beside the user's under build isolation.
The native core is built against LibTorch's stable ABI, so the headers of any torch >= 2.11 serve, and the
one that the user already has is the cheapest.
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
    """Ask for torch unless the interpreter that runs pip has one.

    ``-I`` drops the PYTHONPATH with which pip isolates a build, so the user's own packages are visible.
    """
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    found = subprocess.run([sys.executable, "-I", "-c", probe]).returncode == 0
    return [] if found else ["torch>=2.11"]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Requirements of scikit-build-core, and torch where there is none."""
    return [*_backend.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Requirements of scikit-build-core, and torch where there is none."""
    return [*_backend.get_requires_for_build_editable(config_settings), *_torch_requirement()]

"""Fake NVML for the monitor, installed by ``System``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.monitor.fake_nvml import FakeNvml


class System:
    """Fakes for the monitor, installed until the test ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            patch.delenv(variable, raising=False)

    def nvml(self, **attributes: Any) -> FakeNvml:
        """Install a fake ``pynvml`` with these attributes."""
        fake = FakeNvml(**attributes)
        self._patch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        return fake

    def without_nvml(self) -> None:
        """Make the import of ``pynvml`` fail."""
        self._patch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Change the number of this process inside the block, as in a forked child."""
        with self._patch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            yield

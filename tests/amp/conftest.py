"""Devices without flatout's kernels."""

import pytest

from flatout.core import gradients


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make flatout unscale and clip gradients with torch's operators, as on a device without kernels.

    Each machine that runs these tests has kernels for all its devices.
    """
    monkeypatch.setattr(gradients, "has_kernels", lambda device: False)

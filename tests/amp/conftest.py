"""A machine whose devices flatout has no kernels for."""

import pytest

from flatout import _gradients


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gradients unscaled and clipped by torch's operators, as on a device without kernels.

    No device of a machine that runs these tests is one.
    """
    monkeypatch.setattr(_gradients, "has_kernels", lambda device: False)

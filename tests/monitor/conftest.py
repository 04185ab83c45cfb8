"""A fake NVML in place of nvidia-ml-py."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.monitor.fake_nvml import FakeNvml


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Makes ``import pynvml`` find a fake with these attributes."""

    def put(**attributes: Any) -> FakeNvml:
        fake = FakeNvml(**attributes)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        return fake

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return put

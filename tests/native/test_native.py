from __future__ import annotations

import pytest
import torch

from flatout import native
from flatout.core import gradients


def test_the_operators_are_registered() -> None:
    for name in ("unscale_and_check", "unscale_and_check_", "make_bucket", "step_bucket_"):
        assert hasattr(torch.ops.flatout, name)


def test_kernels_need_a_gpu() -> None:
    assert native.has_cuda_kernels() == (native.BUILT_WITH_CUDA and torch.cuda.is_available())


def test_each_device_is_asked_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may hold two GPUs, one of which the kernels were not compiled for."""
    monkeypatch.setattr(native, "_kernels_run", lambda device: device == 1)
    devices = [torch.device("cuda", index) for index in (0, 1)]
    assert [gradients.has_kernels(device) for device in devices] == [False, True]

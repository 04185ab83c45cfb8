from __future__ import annotations

import torch

from flatout import _native


def test_the_operators_are_registered() -> None:
    for name in ("unscale_and_check", "unscale_and_check_", "adamw_", "sgd_"):
        assert hasattr(torch.ops.flatout, name)


def test_kernels_need_a_gpu() -> None:
    assert _native.has_cuda_kernels() == (_native.BUILT_WITH_CUDA and torch.cuda.is_available())

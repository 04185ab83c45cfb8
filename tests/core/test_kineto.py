"""Silence of torch's C++ logger while memory is profiled."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flatout.core.kineto import quiet_allocator

ERROR = 2


@pytest.fixture
def level() -> ctypes.c_int:
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        pytest.skip("this torch does not export the level of its logger")


def test_the_level_is_error_inside_and_as_before_afterwards(
    level: ctypes.c_int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    before = level.value
    with quiet_allocator():
        assert level.value == ERROR != before
    assert level.value == before


def test_a_level_that_the_user_has_set_stays(level: ctypes.c_int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    before = level.value
    with quiet_allocator():
        assert level.value == before

"""Comparison of a driver with the CUDA runtime that flatout was built with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from flatout import native
from flatout.native import _host, driver


@pytest.fixture(autouse=True)
def warn_again() -> Iterator[None]:
    driver.warn_of_old_driver.cache_clear()
    yield
    driver.warn_of_old_driver.cache_clear()


def test_versions_of_this_process() -> None:
    version, runtime = _host.cuda_versions()
    assert (runtime > 0) == native.BUILT_WITH_CUDA
    assert version == 0 or version >= 10000


@pytest.mark.parametrize(
    ("versions", "is_old", "remedies"),
    [
        ((13000, 13000), False, []),
        ((13000, 13010), False, []),  # minor versions are compatible
        ((13010, 12080), False, []),
        ((12010, 12080), False, []),
        ((12000, 12080), True, ["CUDA 12.1 "]),
        ((11080, 12080), True, ["CUDA 12.1 "]),
        # torch for CUDA 12, and flatout built with CUDA 13
        ((12040, 13000), True, ["CUDA 13.0 ", "CUDA 12 toolkit"]),
        ((12000, 13000), True, ["CUDA 13.0 "]),  # also too old for flatout built with CUDA 12
        ((0, 13000), False, []),  # no driver
        ((13000, 0), False, []),  # flatout built without CUDA
    ],
)
def test_a_driver_is_too_old(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[int, int], is_old: bool, remedies: list[str]
) -> None:
    monkeypatch.setattr(_host, "cuda_versions", lambda: versions)
    old = native.old_driver()
    assert (old is not None) == is_old
    if old is not None:
        assert (old.supports, old.built_with) == tuple(f"{v // 1000}.{v % 1000 // 10}" for v in versions)
        assert all(remedy in old.fix for remedy in remedies)
        assert ("toolkit" in old.fix) == (len(remedies) == 2)


@pytest.mark.skipif(_host.cuda_usable(), reason="this machine has a working driver")
def test_a_fall_back_for_the_driver_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "cuda_versions", lambda: (12040, 13000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert not native.has_cuda_runtime()
            assert not native.has_cuda_kernels()
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    assert all(part in str(warning.message) for part in ("12.4", "13.0", "CUDA 12 toolkit"))


@pytest.mark.skipif(_host.cuda_usable(), reason="this machine has a working driver")
def test_a_machine_without_a_driver_is_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "cuda_versions", lambda: (0, 13000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.has_cuda_runtime()
        assert not native.has_cuda_kernels()

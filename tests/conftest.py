"""What every test shares: random states that are put back, quick new processes, and GPU tests that skip aloud."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.dont_write_bytecode:
    # Every process that a test starts would compile torch's modules anew, which takes three times as long as torch's
    # import does. Nothing is written beside the modules.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parents[1] / "build" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Idle threads of OpenMP sleep. By default they spin, on cores that other test processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.clock import Clock, simulated_tuning
from tests.process_state import put_back

GPU_TESTS = Path(__file__).parent / "gpu"
FAIL_WITHOUT_GPU = os.environ.get("FLATOUT_FAIL_WITHOUT_GPU") == "1"

# A shared machine makes single examples slow at random; what takes too long shows in the suite's own time.
settings.register_profile("flatout", deadline=None)
settings.load_profile("flatout")

# There is one server for all tests, started by the first that needs it: what any of its processes imports.
multiprocessing.set_forkserver_preload(
    ["flatout.data", "tests.samples", "tests.optim.dtensor_checks", "tests.checkpoint.training"]
)


def _missing_for_gpu_tests() -> str:
    """What keeps GPU tests from running here; empty when nothing does."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: `make gpu-check` on a machine that has one"
    importlib.import_module("flatout")  # which loads its operators
    if not torch._C._dispatch_has_kernel_for_dispatch_key("flatout::scale_", "CUDA"):
        return "needs flatout's CUDA kernels: built without nvcc"
    return ""


def _needs_gpu(item: pytest.Item) -> bool:
    return GPU_TESTS in item.path.parents


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random jobs of tests/differential")
    group.addoption("--jobs", type=int, metavar="N", help="run N random jobs instead of the chosen ones")
    group.addoption("--seed", type=int, default=0, help="of the first of them; the others' follow it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing_for_gpu_tests()
    if missing and not FAIL_WITHOUT_GPU:
        for item in filter(_needs_gpu, items):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.hookimpl(tryfirst=True)  # before a file's own skipif
def pytest_runtest_setup(item: pytest.Item) -> None:
    if FAIL_WITHOUT_GPU and _needs_gpu(item) and (missing := _missing_for_gpu_tests()):
        pytest.fail(f"FLATOUT_FAIL_WITHOUT_GPU=1: {missing}", pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Peaks measured by tests, on a machine busy with tests, are nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Each ``gc.collect()`` of a test is spared the million objects that were there before its module."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def restored_after_a_module() -> Iterator[None]:
    """Put back what fixtures of a module change of the process, for example with a run that they share."""
    with put_back():
        yield


@pytest.fixture(autouse=True)
def restored_after_a_test() -> Iterator[None]:
    """Put back random states, threads and backend flags, so that no test meets those of another."""
    with put_back():
        yield


@pytest.fixture(autouse=True)
def ended_workers() -> Iterator[None]:
    """Workers end with their test.

    Where a loader's iterator is part of a cycle, as the frames of a caught exception make one, Python's collector
    closes torch's queues before the iterator tells its workers to end: some later test would wait for each of them,
    for five seconds.
    """
    yield
    if multiprocessing.active_children():
        for iterator in [value for value in gc.get_objects() if type(value) is _MultiProcessingDataLoaderIter]:
            iterator._shutdown_workers()


@pytest.fixture(scope="session")
def simulated_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of the peaks measured on simulated clocks, which tests on the real clock must not read."""
    return tmp_path_factory.mktemp("simulated")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, simulated_cache: Path) -> Iterator[Clock]:
    """Simulated clock for tests of ``optimize``. ``TimedStep`` or the test advances the clock."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(simulated_cache))
    monkeypatch.setattr("flatout.mfu.peaks._SIZES", {"cpu": (64,)})  # tests on this clock check no peak
    with simulated_tuning() as clock:
        yield clock


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What trials leave behind does not depend on how long they take."""
    monkeypatch.setattr("flatout.measure.bench.TRIAL_SECONDS", 0.2)

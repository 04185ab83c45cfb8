"""Fixtures of all tests: restored process state, fast process starts, and reasons for skipped GPU tests."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.dont_write_bytecode:
    # Without bytecode files each process that a test starts compiles torch's modules again, which takes three times as
    # long as importing torch. The files lie in a folder outside the installed modules.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parents[1] / "build" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Idle threads of OpenMP sleep. By default they spin, on cores that other test processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flatout.core import torch_state
from tests.clock import Clock, simulated_tuning
from tests.compiler import Compiler
from tests.process_state import put_back
from tests.ranks import RankPool

GPU_TESTS = Path(__file__).parent / "gpu"
FAIL_WITHOUT_GPU = os.environ.get("FLATOUT_FAIL_WITHOUT_GPU") == "1"

# On a shared machine single examples are slow at random, so no example has a deadline.
settings.register_profile("flatout", deadline=None)
settings.load_profile("flatout")

# All tests share one forkserver, which preloads the modules of its processes.
multiprocessing.set_forkserver_preload(
    ["flatout.data", "tests.samples", "tests.optim.dtensor_checks", "tests.training.checkpoint.training"]
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Return two ranks."""
    with RankPool(2, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Return two ranks, and then four."""
    with RankPool(request.param, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


def _missing_for_gpu_tests() -> str:
    """Return the reason to skip GPU tests, empty if they can run."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: `make gpu-check` on a machine that has one"
    importlib.import_module("flatout")  # loads flatout's operators
    if not torch._C._dispatch_has_kernel_for_dispatch_key("flatout::scale_", "CUDA"):
        return "needs flatout's CUDA kernels: built without nvcc"
    return ""


def _needs_gpu(item: pytest.Item) -> bool:
    return GPU_TESTS in item.path.parents


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random jobs of tests/differential, and random runs of tests/tuning and tests/distributed")
    group.addoption("--jobs", type=int, metavar="N", help="run N random ones instead of the usual ones")
    group.addoption("--seed", type=int, default=0, help="of the first of them; the others' follow it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing_for_gpu_tests()
    if missing and not FAIL_WITHOUT_GPU:
        for item in filter(_needs_gpu, items):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.hookimpl(tryfirst=True)  # runs before a test file's skipif
def pytest_runtest_setup(item: pytest.Item) -> None:
    if FAIL_WITHOUT_GPU and _needs_gpu(item) and (missing := _missing_for_gpu_tests()):
        pytest.fail(f"FLATOUT_FAIL_WITHOUT_GPU=1: {missing}", pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache folder without plans, because peaks measured during other tests are wrong for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FLATOUT_BUDGET", raising=False)
        patch.setenv("FLATOUT_CACHE", str(_without_plans(tmp_path_factory.mktemp("cache"))))
        yield


def _without_plans(cache: Path) -> Path:
    """Put a file in the place of the folder of plans, so that no test repeats the decisions of another."""
    (cache / "plans").touch()
    return cache


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Exclude the million objects that exist before a module from each ``gc.collect()`` of its tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def restored_after_a_module() -> Iterator[None]:
    """Restore the process state that fixtures of a module change, for example with a shared run."""
    with put_back():
        yield


@pytest.fixture(autouse=True)
def restored_after_a_test() -> Iterator[None]:
    """Restore random states, threads and backend flags, so that no test affects another."""
    with put_back():
        yield


@pytest.fixture(autouse=True)
def no_code_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the code that earlier tests compiled as flatout's, because it is not the test's script's."""
    monkeypatch.setattr(torch_state, "_own", torch_state.compiled_frames())


@pytest.fixture(autouse=True)
def ended_workers() -> Iterator[None]:
    """Shut down a test's loader workers at the end of the test.

    The frames of a caught exception can put a loader's iterator into a reference cycle. Python's collector then closes
    torch's queues before the iterator stops its workers. A later test would wait five seconds for each worker.
    """
    yield
    if multiprocessing.active_children():
        for iterator in [value for value in gc.get_objects() if type(value) is _MultiProcessingDataLoaderIter]:
            iterator._shutdown_workers()


@pytest.fixture(scope="session")
def simulated_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of the peaks measured on simulated clocks, which tests on the real clock must not read."""
    return _without_plans(tmp_path_factory.mktemp("simulated"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, simulated_cache: Path) -> Iterator[Clock]:
    """Simulated clock for tests of ``optimize``. ``TimedStep`` or the test advances the clock."""
    monkeypatch.setenv("FLATOUT_CACHE", str(simulated_cache))
    monkeypatch.setattr("flatout.mfu.peaks._SIZES", {"cpu": (64,)})  # tests on this clock check no peak
    with simulated_tuning() as clock:
        yield clock


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Replacement of ``torch.compile`` that generates no code."""
    torch._dynamo.reset()
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler.compile)
    yield compiler
    torch._dynamo.reset()


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten trials, for tests of state that does not depend on the length of a trial."""
    monkeypatch.setattr("flatout.tuning.bench.TRIAL_SECONDS", 0.2)

"""What malloc does with freed memory is set, measured, and put back to what glibc had come to."""

import subprocess
import sys
import textwrap

import pytest
from torch.nn import functional

import flatout
from flatout import _malloc
from flatout.measure.state import State
from tests.jobs import make_job

pytestmark = pytest.mark.skipif(bool(_malloc.why_not()), reason=_malloc.why_not())


def optimized() -> flatout.Run:
    model, loader, opt = make_job()
    return flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0, device="cpu")


@pytest.fixture(autouse=True)
def as_glibc_has_it():
    before = _malloc.keeps()
    _malloc.keep(False)
    yield
    _malloc.keep(before)


def in_another_process(script: str) -> None:
    """What glibc does depends on what its heap has been through; thresholds that were set once it moves no more."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_it_is_set_and_put_back():
    run = optimized()
    assert _malloc.keeps()
    assert run.report.row("malloc").status == "kept"
    run.undo()
    assert not _malloc.keeps()


def test_pages_of_freed_tensors_are_not_asked_for_again():
    in_another_process("""
        import resource
        from pathlib import Path
        import torch
        from flatout import _malloc

        def step() -> None:
            [torch.ones(2**22) for _ in range(5)]  # 16 MiB each, 4,096 pages

        def faults() -> int:
            step(), step()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            step()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1])

        assert faults() > 4_000
        _malloc.keep(True)
        assert faults() < 100
        kept = resident()
        _malloc.keep(False)
        assert resident() < kept - 16_000
        """)


def test_the_threshold_is_the_one_that_glibc_came_to():
    in_another_process("""
        import ctypes
        from flatout import _malloc

        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        came_to = 2**24
        libc.free(libc.malloc(came_to))  # mapped: its free raises the threshold to its size
        assert came_to <= _malloc._mmap_threshold(libc) <= 1.08 * came_to
        _malloc.keep(True)
        _malloc.keep(False)
        assert came_to <= _malloc._mmap_threshold(libc) <= 1.16 * came_to
        """)


def test_a_state_puts_it_back():
    state = State.capture([])
    _malloc.keep(True)
    state.restore()
    assert not _malloc.keeps()


def test_a_process_tuned_by_its_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    row = optimized().report.row("malloc")
    assert row.status == "not applicable"
    assert "MALLOC_TRIM_THRESHOLD_" in row.why

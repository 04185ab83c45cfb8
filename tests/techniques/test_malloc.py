"""What malloc does with freed memory is set, measured, and put back to what glibc had come to."""

import resource
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn import functional

import flatout
from flatout import _malloc
from flatout.measure.state import State
from tests.helpers import in_child
from tests.jobs import make_job

pytestmark = pytest.mark.skipif(bool(_malloc.why_not()), reason=_malloc.why_not())


def optimized() -> flatout.Run:
    model, loader, opt = make_job()
    return flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0, device="cpu")


def faults(work) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_it_is_set_and_put_back():
    run = optimized()
    assert _malloc.keeps()
    assert run.report.row("malloc").status == "kept"
    run.undo()
    assert not _malloc.keeps()


def test_pages_of_freed_tensors_are_not_asked_for_again():
    def allocate() -> None:
        for _ in range(20):
            torch.ones(2**22)  # 16 MiB, 4,096 pages

    def check() -> None:
        torch.set_num_threads(1)  # OpenMP's have stayed in the parent
        allocate()
        assert faults(allocate) > 4_000
        _malloc.keep(True)
        allocate()
        assert faults(allocate) < 1_000
        _malloc.keep(False)
        assert faults(allocate) > 4_000  # what was kept has been given back

    assert in_child(check) == 0


def test_the_threshold_is_the_one_that_glibc_came_to():
    """In a process of its own: once somebody has set it, glibc moves it no more."""
    script = """
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
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


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

"""malloc settings that keep freed memory, and their revert to glibc's own values."""

import subprocess
import sys
import textwrap

import pytest
from torch import nn
from torch.nn import functional

import flatout
from flatout.core.snapshot import Snapshot
from tests.jobs import job_of, make_job
from tests.process_state import malloc
from tests.reasons import reasons
from tests.techniques.harness import forced, refusal

pytestmark = pytest.mark.skipif(
    refusal("malloc", job_of(nn.Linear(1, 1))) is not None, reason="needs glibc's malloc, as it comes"
)


def optimized() -> flatout.Run:
    model, loader, opt = make_job()
    return flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0, device="cpu")


def in_another_process(script: str) -> None:
    """Run a script in a new process, whose heap holds few objects.

    glibc stops adapting a threshold that was set once, and any object may keep a block from being freed.
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_malloc_is_set_and_reverted():
    run = optimized()
    assert malloc()
    assert run.report.row("malloc").status == "kept"
    run.undo()
    assert not malloc()


@pytest.mark.slow
def test_pages_of_freed_tensors_are_not_asked_for_again():
    in_another_process("""
        import resource
        from pathlib import Path
        import torch
        from flatout.techniques import malloc

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
        malloc.keep(True)
        assert faults() < 100
        kept = resident()
        malloc.keep(False)
        assert resident() < kept - 16_000
        """)


@pytest.mark.slow
def test_the_threshold_is_the_one_that_glibc_came_to():
    in_another_process("""
        import ctypes
        from flatout.techniques import malloc

        class Statistics(ctypes.Structure):  # struct mallinfo
            _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks a b c d e f".split()]

        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
            ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
        )
        libc.mallinfo.restype = Statistics

        def is_mapped(size: int) -> bool:
            blocks = libc.mallinfo().hblks
            block = libc.malloc(size)
            mapped = libc.mallinfo().hblks > blocks
            libc.free(block)
            return mapped

        came_to = 2**24
        libc.free(libc.malloc(came_to))  # mapped: its free raises the threshold to its size
        assert not is_mapped(came_to - 2**16)
        malloc.keep(True)
        assert not is_mapped(2 * came_to - 2**16)
        malloc.keep(False)
        assert not is_mapped(came_to - 2**16)
        assert is_mapped(int(1.16 * came_to))
        """)


def test_a_state_puts_it_back():
    state = Snapshot.capture([])
    with forced("malloc", True, job_of(nn.Linear(1, 1))):
        assert malloc()
        state.restore()
        assert not malloc()


def test_a_process_tuned_by_its_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    row = optimized().report.row("malloc")
    assert row.status == "not applicable"
    assert "set-by-user" in reasons(row)
    assert "MALLOC_TRIM_THRESHOLD_" in row.why
    assert not malloc()


def test_training_on_a_gpu_is_left_alone():
    assert "on-gpu" in refusal("malloc", job_of(nn.Linear(1, 1), device="cuda"))

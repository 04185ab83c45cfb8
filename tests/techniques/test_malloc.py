"""Freed memory is kept by malloc, and given back as before with the settings that glibc had come to."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch import nn
from torch.nn import functional

import flatout
from flatout.measure import State
from tests.jobs import make_job
from tests.process_state import malloc
from tests.reasons import reasons
from tests.techniques.harness import applied, job_of, refusal

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    refusal("malloc", job_of(nn.Linear(1, 1))) is not None, reason="needs glibc's malloc, as it comes"
)


def optimized() -> flatout.Run:
    model, loader, opt = make_job()
    return flatout.optimize(model, loader, opt, functional.cross_entropy, budget=0, device="cpu")


def in_another_process(script: str) -> None:
    """What glibc does depends on what its heap has been through; thresholds that were set once it moves no more."""
    setup = """
        from torch import nn
        from tests.techniques.harness import applied, job_of

        def keeping():
            return applied("malloc", True, job_of(nn.Linear(1, 1)))
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(setup) + textwrap.dedent(script)], check=True, cwd=ROOT)


def test_it_is_set_and_put_back():
    run = optimized()
    assert malloc()
    assert run.report.row("malloc").status == "kept"
    run.undo()
    assert not malloc()


def test_pages_of_freed_tensors_are_not_asked_for_again():
    in_another_process("""
        import resource
        from pathlib import Path
        import torch

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
        with keeping():
            assert faults() < 100
            kept = resident()
        assert resident() < kept - 16_000
        """)


def test_the_threshold_is_the_one_that_glibc_came_to():
    in_another_process("""
        import ctypes

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
        with keeping():
            assert not is_mapped(2 * came_to - 2**16)
        assert not is_mapped(came_to - 2**16)
        assert is_mapped(int(1.16 * came_to))
        """)


def test_a_state_puts_it_back():
    state = State.capture([])
    with applied("malloc", True, job_of(nn.Linear(1, 1))):
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

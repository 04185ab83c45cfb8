from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flatout import native
from flatout.core import gradients
from tests.helpers import run_script


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


FREED_BY_A_THREAD_OF_TORCH = """
import torch
from flatout.native import _host

try:
    import _interpreters as interpreters
except ImportError:  # Python before 3.13
    import _xxsubinterpreters as interpreters


@torch.jit.script
def work(x: torch.Tensor, slow: torch.Tensor) -> float:
    for _ in range(20):
        slow = slow @ slow
    return (x.sum() + slow.sum()).item()


@torch.jit.script
def apart(x: torch.Tensor, slow: torch.Tensor):
    return torch.jit.fork(work, x, slow)


interpreters.create()
ring, source = _host.Ring(-1), torch.ones(8)
columns = _host.Columns([([(source.data_ptr(), 8, 4)], 4, 2, 32, [])], source)
stager = _host.Stager(ring)
batches = stager.gather(columns, 0, 0, 8, 1, source)
x = torch.from_dlpack(*batches.take(0))
result = apart(x, torch.zeros(500, 500))
del x, batches, stager, ring
print(result.wait())
"""


def test_a_thread_without_the_gil_frees_a_ring_beside_sub_interpreters(tmp_path: Path) -> None:
    """The thread has the last reference to a batch, which has the last reference to its ring."""
    (tmp_path / "script.py").write_text(FREED_BY_A_THREAD_OF_TORCH)  # TorchScript reads the source
    ended = run_script("import runpy, sys; runpy.run_path(sys.argv[1])", str(tmp_path / "script.py"))
    assert ended.stdout.split() == ["8.0"]

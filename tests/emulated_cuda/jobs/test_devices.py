"""No context on the first device while the second device trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.emulated_cuda.record import EMULATED

pytestmark = pytest.mark.skipif(not EMULATED, reason="needs the emulated devices: `make test-emulated`")

# SGD, because torch's Adam asks if the current stream is capturing. This call makes a context on the current device.
TRAINING = """
import ctypes
from tests.gpu.trainings import Setup, optimize, train
train(optimize(Setup("convolutions", "sgd"), {techniques}, device="cuda:1"), 2)
flags, is_active = ctypes.c_uint(), ctypes.c_int()
assert ctypes.CDLL(None).cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active)) == 0
print("contexts of the first device:", is_active.value)
"""


@pytest.mark.xfail(
    strict=True, reason="leaving torch.cuda.stream(...) sets the first device again, which makes a context"
)
@pytest.mark.parametrize("techniques", [{}, {"fused_optimizer": True, "cuda_graph": True}], ids=["torch", "graph"])
def test_training_on_the_second_device(techniques: dict[str, bool]) -> None:
    """Train in a new process, because a context lives until its process ends."""
    script = TRAINING.format(techniques=techniques)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "contexts of the first device: 0\n"

"""CPUs of the prefetcher's threads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.emulated_cuda.record import needs_emulated_devices
from tests.helpers import run_script

SYSFS = Path("/sys/bus/pci/devices")
pytestmark = [
    needs_emulated_devices,
    pytest.mark.skipif(not SYSFS.exists(), reason="needs a list of PCI devices"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
]

TRAIN = """
import os, torch
from pathlib import Path
from flatout.data import Prefetcher

threads = lambda: {int(thread.name) for thread in Path("/proc/self/task").iterdir()}
before, allowed = threads(), os.sched_getaffinity(0)
for _ in Prefetcher([torch.ones(1 << 21)] * 4, "cuda"):
    started = [os.sched_getaffinity(thread) for thread in threads() - before]
assert os.sched_getaffinity(0) == allowed
assert {CPU} in started if CPU in allowed else all(cpus == allowed for cpus in started)
"""


@pytest.mark.parametrize("is_allowed", [True, False])
def test_staging_threads_stay_beside_their_gpu(is_allowed: bool) -> None:
    """Threads keep their CPUs if the process may use no CPU near the GPU."""
    near = max(os.sched_getaffinity(0)) if is_allowed else os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:  # a short name in lower case, like the name of a PCI device
        Path(folder, "local_cpulist").write_text(f"{near}\n")
        run_script(TRAIN.replace("CPU", str(near)), EMULATED_CUDA_PCI_BUS_ID=os.path.relpath(folder, SYSFS))

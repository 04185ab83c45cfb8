"""Samples of the GPUs by NVML, live and as JSON lines.

    with Sampler(write=JsonLines("run.jsonl")):
        train()

NVML requires ``pip install 'flatout[monitor]'``, which installs ``nvidia-ml-py``. Without this package, a GPU or a
driver, samples have no GPUs and name the reason.
"""

from flatout.monitor.nvml import GpuSample, JsonLines, Sample, read_samples
from flatout.monitor.sampler import Sampler

__all__ = ["GpuSample", "JsonLines", "Sample", "Sampler", "read_samples"]

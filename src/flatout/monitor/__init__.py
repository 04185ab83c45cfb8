"""Live monitoring of the GPUs, the host and the training's processes, once a second.

    with Sampler(write=JsonLines("run.jsonl")):
        train()

GPUs require ``nvidia-ml-py``. CPU and processes require ``psutil``. ``pip install 'flatout[monitor]'`` installs both.
Without these packages, a GPU or a driver, samples name the missing part and the reason.
"""

from flatout.monitor.jsonlines import JsonLines, read_samples
from flatout.monitor.sample import GpuSample, HostSample, ProcessSample, Sample
from flatout.monitor.sampler import Sampler

__all__ = ["GpuSample", "HostSample", "JsonLines", "ProcessSample", "Sample", "Sampler", "read_samples"]

"""Live monitoring: what the GPUs, the host and the training's processes do, once a second, at a few ms of CPU each.

    with Sampler(write=JsonLines("run.jsonl")):
        train()

GPUs need ``nvidia-ml-py``, CPU and processes ``psutil``: ``pip install 'flatout[monitor]'``. Without them, and without
a GPU or a driver, samples are taken all the same and say what is missing and why.
"""

from flatout.monitor.jsonlines import JsonLines, read_samples
from flatout.monitor.sample import GpuSample, HostSample, ProcessSample, Sample
from flatout.monitor.sampler import Sampler

__all__ = ["GpuSample", "HostSample", "JsonLines", "ProcessSample", "Sample", "Sampler", "read_samples"]

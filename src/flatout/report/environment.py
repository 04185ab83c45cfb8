"""Environment of figures: device, cores, versions and date."""

from __future__ import annotations

import platform
import time

import torch

from flatout.core.machine import cpu_name, usable_cores
from flatout.core.version import __version__


def environment_of(device: torch.device) -> dict[str, str]:
    """Return the environment of figures that are measured on ``device``, fact by name."""
    if device.type == "cuda":
        cudnn = str(torch.backends.cudnn.version())
        gpu = {"cpu": cpu_name(), "cuda": str(torch.version.cuda), "cudnn": cudnn}
    else:
        gpu = {}
    return {
        "device": f"{device.type} ({torch.cuda.get_device_name(device) if gpu else cpu_name()})",
        **gpu,
        "cores": str(usable_cores()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "flatout": __version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }

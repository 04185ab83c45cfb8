"""What figures must be read with: device, cores, versions."""

from __future__ import annotations

import platform

import torch

from flatout.core.machine import usable_cores
from flatout.core.version import __version__


def environment_of(device: torch.device) -> dict[str, str]:
    """What was measured on ``device`` must be read with this: name to fact."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "cores": str(usable_cores()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "flatout": __version__,
        "python": platform.python_version(),
    }

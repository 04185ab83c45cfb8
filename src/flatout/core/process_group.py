"""Size of the process group of a distributed training."""

from __future__ import annotations

import torch.distributed as dist


def group_size() -> int:
    """Return the number of processes in the default process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

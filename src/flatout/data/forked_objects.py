"""Objects of CUDA in a forked process, such as a loader's worker, which cannot free them.

The runtime raises in a child whose parent has used the device. The destructors of torch's events, and of tensors that
several streams have used, do not expect that, and end the process. A collection of the parent's garbage would call them
(https://github.com/rwth-i6/returnn/issues/1494).
"""

from __future__ import annotations

import gc
import os

import torch


def _keep() -> None:
    """Exclude all objects of the parent from collections, if the parent has used a CUDA device."""
    if torch.cuda._is_in_bad_fork():
        gc.freeze()


os.register_at_fork(after_in_child=_keep)

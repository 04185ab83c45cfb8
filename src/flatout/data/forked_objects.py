"""Protection of forked processes, such as loader workers, from freeing CUDA objects of the parent.

CUDA raises in a child whose parent has used the device. The destructors of torch's events, and of tensors that several
streams have used, do not catch the exception, so the child ends with SIGABRT. A garbage collection in the child would
call these destructors (https://github.com/rwth-i6/returnn/issues/1494).
"""

from __future__ import annotations

import gc
import os

import torch


def _keep() -> None:
    """Exclude all objects of the parent from garbage collection, if the parent has used a CUDA device."""
    if torch.cuda._is_in_bad_fork():
        gc.freeze()


os.register_at_fork(after_in_child=_keep)

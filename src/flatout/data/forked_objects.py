"""Protection of a forked process, such as a loader's worker, from CUDA objects of its parent.

CUDA calls fail in a child process whose parent has used a device. The destructors of torch's events, and of tensors
that several streams have used, make such calls. A failure in a destructor aborts the process. So garbage collection in
the child must not free objects of the parent (https://github.com/rwth-i6/returnn/issues/1494).
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

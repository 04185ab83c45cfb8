"""CUDA memory that several streams use."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from flatout.core.batches import tensors_within


def share_with(stream: torch.cuda.Stream, batch: Any) -> None:
    """Make the allocator wait for ``stream`` before it reuses the CUDA memory of a batch.

    The wait covers all work that is queued on ``stream`` when the memory is freed.

    Args:
        stream: a stream that uses the memory, other than the stream that allocated the memory.
        batch: any nesting of tensors, and of objects that have tensors as attributes.
    """
    for tensor in tensors_within(batch):
        if tensor.is_cuda:
            with contextlib.suppress(NotImplementedError):  # of sparse and quantized tensors
                tensor.record_stream(stream)

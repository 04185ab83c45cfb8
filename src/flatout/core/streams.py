"""CUDA memory that several streams use."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from flatout.core.batches import tensors_within


def share_with(stream: torch.cuda.Stream, batch: Any) -> None:
    """Record ``stream`` as a user of a batch's CUDA memory, as ``Tensor.record_stream`` does for one tensor.

    After a tensor is freed, the allocator reuses its memory only when ``stream`` has run all work queued until then.

    Args:
        stream: the stream that uses the memory, other than the one that allocated it.
        batch: any nesting of tensors, and of objects with tensors as attributes.
    """
    for tensor in tensors_within(batch):
        if tensor.is_cuda:
            with contextlib.suppress(NotImplementedError):  # raised by sparse and quantized tensors
                tensor.record_stream(stream)

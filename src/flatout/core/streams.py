"""Memory that several CUDA streams use."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from flatout.core.batches import tensors_within


def share_with(stream: torch.cuda.Stream, batch: Any) -> None:
    """Delay the reuse of a batch's CUDA memory after its free until the work then queued on ``stream`` has run.

    Args:
        stream: uses the memory, and is not the stream that allocated it.
        batch: any nesting of tensors, and of objects with tensors as attributes.
    """
    for tensor in tensors_within(batch):
        if tensor.is_cuda:
            with contextlib.suppress(NotImplementedError):  # sparse and quantized tensors cannot
                tensor.record_stream(stream)

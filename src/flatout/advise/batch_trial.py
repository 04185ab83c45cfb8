"""Trial of a larger batch: a recorded call with its own samples, and with several times as many samples."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from flatout.autotune.recorder import RecordedCall
from flatout.core.batches import batch_size_of, map_tensors, tensors_of
from flatout.core.snapshot import Snapshot

TIMES = 4
"""Samples of the larger batch, relative to the script's batch."""

_ROUNDS = 5
"""Calls of each size. The fastest counts, because other processes only slow a call down."""


def seconds_of_sizes(module: nn.Module, call: RecordedCall) -> tuple[float, float]:
    """Return the seconds of forward and backward for a call, and for the call with ``TIMES`` times its samples.

    The module, its gradients and the random generators are restored.
    """
    samples = batch_size_of((call.args, call.kwargs))

    def repeated(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * TIMES) if tensor.dim() and tensor.size(0) == samples else tensor

    sizes = [(call.args, call.kwargs), map_tensors(repeated, (call.args, call.kwargs))]
    snapshot = Snapshot.capture([module], code=[module])
    try:
        with torch.inference_mode(False), torch.enable_grad():
            taken = [[_seconds(module, size, call) for size in sizes] for _ in range(_ROUNDS)]
    finally:
        snapshot.restore()
        snapshot.restore_versions()
    small, large = (min(column) for column in zip(*taken, strict=True))
    return small, large


def _seconds(module: nn.Module, size: tuple[Any, Any], call: RecordedCall) -> float:
    args, kwargs = size
    parameters = [p for p in module.parameters() if p.requires_grad]
    begun = time.perf_counter()
    with ExitStack() as stack:
        for device, dtype in call.autocast:
            stack.enter_context(torch.autocast(device, dtype))
        outputs = [t.float().sum() for t in tensors_of(module(*args, **kwargs)) if t.requires_grad]
    torch.autograd.grad(torch.stack(outputs).sum(), parameters, allow_unused=True)
    if parameters[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun

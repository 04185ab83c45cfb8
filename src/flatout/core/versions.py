"""Version counters of tensors, by which autograd finds writes to what a backward still needs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Versions:
    """Version counters of tensors at construction, to restore after later writes have been undone bit for bit.

    Autograd then accepts a graph that saved these tensors before the writes.

    Args:
        tensors: any tensors. Inference tensors have no counter.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        counted = [tensor for tensor in {id(t): t for t in tensors}.values() if not tensor.is_inference()]
        self._tensors = tuple(counted)
        self._versions = tuple(tensor._version for tensor in counted)

    def restore(self) -> None:
        """Set the counters back."""
        if self._tensors:
            torch._C._autograd._unsafe_set_version_counter(self._tensors, self._versions)

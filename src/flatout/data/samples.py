"""Layout of a sample: its containers, and the type, dtype and shape of each leaf."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.in_memory_loader import why_not_column

_LARGEST_INT = torch.iinfo(torch.int64).max
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class NotCacheable(ValueError):
    """Samples that cannot be kept in memory. The message says why."""


@dataclass(frozen=True)
class Leaf:
    """Type, dtype and shape of a tensor, an array or a number."""

    kind: type
    """``Tensor``, ``np.ndarray``, a NumPy scalar type, ``int``, ``float`` or ``bool``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] = field(default=(), compare=False)
    """Dimensions, from the longest stride to the shortest."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Container:
    kind: type
    keys: tuple[Any, ...] | None
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class SampleLayout:
    """Containers and leaves of a sample. Samples of equal layout differ only in values."""

    structure: _Container | Leaf
    leaves: tuple[Leaf, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values of a sample."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def build(self, values: Iterator[Any]) -> Any:
        """Return a sample with ``values`` as its leaves."""
        return _built(self.structure, values)

    def difference(self, other: SampleLayout) -> str:
        """Return how a sample of layout ``other`` differs from ``dataset[0]``, which has this layout.

        The text continues a sentence that begins with "dataset[i] ".
        """
        if [leaf.kind for leaf in self.leaves] == [leaf.kind for leaf in other.leaves]:
            for here, there in zip(self.leaves, other.leaves, strict=True):
                if here != there:
                    return (
                        f"holds {there.dtype} {there.shape} where dataset[0] holds {here.dtype} {here.shape}: "
                        "samples differ in shape"
                    )
        return "is made of other types than dataset[0]"


def taken_apart(sample: Any) -> tuple[SampleLayout, list[Any]]:
    """Return the layout of ``sample`` and the values of its leaves, in order.

    Raises:
        NotCacheable: ``sample`` does not consist of plain CPU tensors, arrays and numbers in dicts, lists and (named)
            tuples. The message continues a sentence that begins with "dataset[i] ".
    """
    leaves: list[Leaf] = []
    values: list[Any] = []
    structure = _walk(sample, leaves, values)
    return SampleLayout(structure, tuple(leaves)), values


def _walk(sample: Any, leaves: list[Leaf], values: list[Any]) -> _Container | Leaf:
    kind = type(sample)
    if kind in (dict, OrderedDict):
        return _Container(kind, tuple(sample), tuple(_walk(value, leaves, values) for value in sample.values()))
    if kind in (list, tuple) or (isinstance(sample, tuple) and hasattr(sample, "_fields")):
        return _Container(kind, None, tuple(_walk(value, leaves, values) for value in sample))
    leaf = _leaf(kind, sample)
    leaves.append(leaf)
    values.append(sample)
    return leaf


def _leaf(kind: type, value: Any) -> Leaf:
    if kind is Tensor:
        reason = _why_not_kept(value)
        if reason is not None:
            raise NotCacheable(f"holds {reason}")
        return Leaf(kind, value.dtype, tuple(value.shape), _order(value.stride()))
    if kind in (np.ndarray, np.memmap):  # the copy in memory is a plain array
        return Leaf(np.ndarray, _torch_dtype(value.dtype), value.shape, _order(value.strides))
    if isinstance(value, (np.number, np.bool_)):
        return Leaf(kind, _torch_dtype(value.dtype), ())
    if kind is int and not -_LARGEST_INT - 1 <= value <= _LARGEST_INT:
        raise NotCacheable("holds an int of more than 64 bits")
    if kind in _NUMBERS:
        return Leaf(kind, _NUMBERS[kind], ())
    raise NotCacheable("holds strings" if kind in (str, bytes) else f"holds a {kind.__name__}")


def _why_not_kept(tensor: Tensor) -> str | None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return why_not_column(tensor)
    return why_not_column(tensor.unsqueeze(0)[:0])  # without rows, any strides and 0 dimensions pass


def _order(strides: tuple[int, ...]) -> tuple[int, ...]:
    if 0 in strides:  # an expanded tensor has no such order
        return tuple(range(len(strides)))
    return tuple(sorted(range(len(strides)), key=lambda dim: -abs(strides[dim])))


@functools.lru_cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        raise NotCacheable(f"holds an array of {dtype}, which torch does not know") from None


def _built(structure: _Container | Leaf, values: Iterator[Any]) -> Any:
    if isinstance(structure, Leaf):
        return next(values)
    kind = structure.kind
    parts = [_built(part, values) for part in structure.parts]
    if structure.keys is not None:
        return kind(zip(structure.keys, parts, strict=True))
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)

"""Samples as bytes, for memory that processes share."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.samples import NotCacheable

_LENGTH = struct.Struct("<q")
_MODES = {"1", "L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"}
"""Modes of images without a palette, whose bytes give all of the pixels."""


def packed(sample: Any) -> list[bytes | memoryview]:
    """Return the bytes of a sample: the pickle, then the values of tensors, arrays and images.

    Raises:
        NotCacheable: the sample cannot be pickled, or holds a tensor that is not a plain CPU tensor.
    """
    buffers: list[pickle.PickleBuffer] = []
    written = io.BytesIO()
    try:
        _Packer(written, protocol=5, buffer_callback=buffers.append).dump(sample)
    except NotCacheable:
        raise
    except Exception as error:  # of the user's classes
        raise NotCacheable(f"holds what cannot be pickled: {error}") from error
    values = [buffer.raw() for buffer in buffers]
    sizes = [written.tell(), *(value.nbytes for value in values)]
    return [struct.pack(f"<{len(sizes) + 1}q", len(sizes), *sizes), written.getvalue(), *values]


def bytes_of(sample: Any) -> bytes:
    """Return the bytes of a sample. Equal samples have equal bytes."""
    return b"".join(bytes(part) for part in packed(sample))


def unpacked(memory: memoryview) -> Any:
    """Return a new copy of a sample from its bytes."""
    (count,) = _LENGTH.unpack_from(memory)
    sizes = struct.unpack_from(f"<{count}q", memory, _LENGTH.size)
    parts, begin = [], _LENGTH.size * (count + 1)
    for size in sizes:
        parts.append(memory[begin : begin + size])
        begin += size
    return pickle.loads(parts[0], buffers=parts[1:])


class Pixels:
    """Image, uint8 [H, W, C], whose copy from memory is a view of the memory.

    Args:
        array: the image. It must not be changed.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _pixels, (self.array.shape, pickle.PickleBuffer(self.array.data))


def _pixels(shape: tuple[int, ...], values: Any) -> Pixels:
    return Pixels(np.frombuffer(values, np.uint8).reshape(shape))


class _Packer(pickle.Pickler):
    """Pickler that leaves the values of tensors, arrays and images out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _reduced_tensor(value)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return _array, (value.dtype, value.shape, *_ordered(value))
        image = getattr(sys.modules.get("PIL.Image"), "Image", None)
        if image is not None and isinstance(value, image):
            return _reduced_image(value, image)
        return NotImplemented


def _reduced_tensor(value: Tensor) -> Any:
    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
        raise NotCacheable("holds a tensor that is not a plain tensor of the CPU")
    kind = type(value)
    if kind is not Tensor and kind.__reduce_ex__ is not Tensor.__reduce_ex__:
        raise NotCacheable(f"holds a {kind.__name__}")
    bits = value.as_subclass(Tensor).resolve_conj().resolve_neg()
    bits = bits.view(_BITS[bits.element_size()]) if bits.element_size() in _BITS else torch.view_as_real(bits)
    return _tensor, (kind, vars(value), value.dtype, tuple(value.shape), *_ordered(bits.numpy()))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ordered(array: np.ndarray) -> tuple[tuple[int, ...], pickle.PickleBuffer]:
    """Return the dimensions of an array from the longest stride to the shortest, and its values in this order."""
    order = tuple(sorted(range(array.ndim), key=lambda dim: -abs(array.strides[dim])))
    return order, pickle.PickleBuffer(np.ascontiguousarray(array.transpose(order)).data)


def _array(dtype: np.dtype, shape: tuple[int, ...], order: tuple[int, ...], values: Any) -> np.ndarray:
    stored = np.frombuffer(values, dtype).reshape([shape[dim] for dim in order])
    return stored.copy().transpose(np.argsort(order)) if shape else stored.copy().reshape(())


def _tensor(
    kind: type,
    attributes: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    values: Any,
) -> Tensor:
    size = dtype.itemsize
    bits = np.uint8 if size == 1 else {2: np.int16, 4: np.int32, 8: np.int64}.get(size, np.float64)
    array = _array(np.dtype(bits), shape if size in _BITS else (*shape, 2), order, values)
    made = torch.from_numpy(array)
    made = made.view(dtype) if size in _BITS else torch.view_as_complex(made)
    if kind is not Tensor:
        made = made.as_subclass(kind)
        made.__dict__.update(attributes)
    return made


def _reduced_image(value: Any, image: Any) -> Any:
    if type(value) is not image or value.mode not in _MODES or value.readonly:
        raise NotCacheable(f"holds an image that is a {type(value).__name__} in mode {value.mode}")
    return _image, (value.mode, value.size, value.info, pickle.PickleBuffer(value.tobytes()))


def _image(mode: str, size: tuple[int, int], info: dict[str, Any], values: Any) -> Any:
    from PIL import Image

    made = Image.frombytes(mode, size, values)
    made.info.update(info)
    return made

"""``Normalize``: conversion of uint8 images to normalized floats on the device, in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.core.batches import map_tensors
from flatout.core.dtensor import PLAIN
from flatout.core.gradients import has_kernels

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEAST, _GREATEST = 1e-18, 1e18  # outside this range, intermediate float32 results lose digits, and bits differ
_MOST_CHANNELS_ON_CUDA = 240


@dataclass(frozen=True)
class Normalize:
    """Transform of batches: uint8 images become ``(x / 255 - mean) / std`` in the dtype and format of the model.

    Use the transform on the device, as in ``Prefetcher(loader, device, transform=Normalize(...))``. There it replaces
    torchvision's ``ToTensor`` and ``Normalize`` on every sample. Workers, pinned memory and PCIe then move a quarter of
    the bytes. The device reads and writes each element once. The dataset must yield bytes, so use ``PILToTensor`` in
    place of ``ToTensor``.

    Every uint8 tensor of shape [N, C, H, W] with C equal to ``len(mean)`` counts as images, at any depth of the batch.
    All other objects pass through unchanged. Contiguous and channels_last images are read in place. Other images are
    copied first. The result takes no part in autograd.

    Values equal ``Normalize(mean, std)(ToTensor()(image)).to(dtype)`` of torchvision on a CPU bit for bit, on all
    devices, in all dtypes and memory formats. torch's own operations on a GPU differ in the last bits of float32,
    because they compute ``x / 255`` as a multiplication by the reciprocal.

    Args:
        mean: one number per channel, for pixels from 0 to 1. Each is 0 or has a magnitude from 1e-18 to 1e18.
        std: one number per channel, for pixels from 0 to 1. Each is from 1e-18 to 1e18.
        dtype: dtype of the result: float32, float16 or bfloat16.
        channels_last: True for a result in channels_last memory format, False for a contiguous result.

    Raises:
        ValueError: ``mean`` or ``std`` is empty, is not a sequence of numbers or is out of range. Or their lengths
            differ, or ``dtype`` is not one of the three.
    """

    mean: Sequence[float]
    std: Sequence[float]
    _: KW_ONLY
    dtype: torch.dtype = torch.float32
    channels_last: bool = True

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must be equally long, got {len(self.mean)} and {len(self.std)} numbers")
        for i, value in enumerate(self.mean):
            if value != 0 and not _LEAST <= abs(value) <= _GREATEST:
                raise ValueError(f"mean[{i}] must be 0 or of a magnitude from {_LEAST} to {_GREATEST}, got {value}")
        for i, value in enumerate(self.std):
            if not _LEAST <= value <= _GREATEST:
                raise ValueError(f"std[{i}] must be from {_LEAST} to {_GREATEST}, got {value}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {self.dtype}")

    def __call__(self, batch: Any) -> Any:
        """Return ``batch`` with its images normalized. All other leaves are the same objects."""
        return map_tensors(self._normalized, batch)

    def _normalized(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.uint8 or tensor.dim() != 4 or tensor.size(1) != len(self.mean):
            return tensor
        if type(tensor) in PLAIN and tensor.layout == torch.strided and _is_native(tensor.device, len(self.mean)):
            return torch.ops.flatout.normalize_images(tensor, self.mean, self.std, self.dtype, self.channels_last)
        return self._by_torch(tensor)

    def _by_torch(self, images: Tensor) -> Tensor:
        # 255 is a tensor, because torch may divide by a Python number as a multiplication by its reciprocal.
        most, mean, std = (
            torch.tensor(values, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
            for values in ((255.0,), self.mean, self.std)
        )
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.float().div_(most).sub_(mean).div_(std).to(self.dtype, memory_format=memory_format)


def _numbers(name: str, values: Iterable[Any]) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a sequence of one number per channel, got {values!r}") from None
    if not numbers:
        raise ValueError(f"{name} must hold at least one number, got none")
    return numbers


def _is_native(device: torch.device, channels: int) -> bool:
    return has_kernels(device) and (device.type != "cuda" or channels <= _MOST_CHANNELS_ON_CUDA)


# What torch.compiler.assume_constant_result does, without the import of torch._dynamo.
_is_native._dynamo_marked_constant = True  # type: ignore[attr-defined]

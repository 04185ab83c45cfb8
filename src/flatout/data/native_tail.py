"""Native form of the usual last transforms: crops, resizes and flips of an image, its tensor, and ``Normalize``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOVES = {"RandomResizedCrop", "RandomCrop", "CenterCrop", "Resize", "RandomHorizontalFlip"}
_MODULE = "torchvision.transforms.transforms"
_FUNCTIONS = ("crop", "resized_crop", "resize", "center_crop", "hflip", "to_tensor", "pil_to_tensor", "normalize")
_METHODS = ("resize", "crop", "transpose")
_LONGEST = 2**20
"""Limit of the operator for the height and width of a resized image, in pixels."""
_PROCESS = os.getpid()
_PROBES = ((9, 7, 5, 7), (9, 7, 5, 6), (9, 7, 6, 5), (7, 9, 6, 6), (40, 9, 11, 5), (9, 40, 5, 11), (5, 5, 9, 11))
"""Heights and widths of images, and of their resized forms, with which Pillow is compared."""


@dataclass(frozen=True)
class NativeTail:
    """First transforms after a front, as one call of native code, with the draws and the bits of torchvision.

    Attributes:
        moves: crops, resizes and flips of version 1 of torchvision, in their order.
        mean: means of the channels for ``Normalize``; empty if the result is uint8.
        std: standard deviations of the channels.
        steps: all transforms that the call replaces.
        state: what the result of the transforms depends on besides the image, from :func:`_state_of`.
    """

    moves: Sequence[Any]
    mean: list[float]
    std: list[float]
    steps: Sequence[Any]
    state: Any

    @property
    def length(self) -> int:
        """Number of transforms that the call replaces."""
        return len(self.steps)

    def is_current(self) -> bool:
        """Return True if the transforms, and the functions that they call, are still the same."""
        return all(map(_is_supported, self.moves)) and bool(_state_of(self.steps) == self.state)

    def fits(self, height: int, width: int) -> bool:
        """Return True if the transforms apply to an image of this size without padding or an error."""
        for move in self.moves:
            kind = type(move).__name__
            if kind in ("RandomCrop", "CenterCrop") and (height < move.size[0] or width < move.size[1]):
                return False
            if kind == "Resize":
                height, width = _resized(move, height, width)
            elif kind != "RandomHorizontalFlip":
                height, width = move.size
            if not 0 < min(height, width) <= max(height, width) <= _LONGEST:
                return False
        return True

    def draw(self, pixels: np.ndarray) -> Drawn:
        """Draw the random numbers of the transforms for an image.

        Args:
            pixels: the image, uint8 [H, W, 3], which ``fits``. It must not change until :func:`run`.
        """
        box = [0, 0, *pixels.shape[:2]]
        size, window, flip = box[2:], box, False
        for move in self.moves:
            kind = type(move).__name__
            if kind == "RandomHorizontalFlip":
                flip ^= bool(torch.rand(1) < move.p)
            elif kind == "Resize":
                size = _resized(move, *size)
                window = [0, 0, *size]
            elif kind == "RandomResizedCrop":
                box = list(move.get_params(_of_size(*size), move.scale, move.ratio))
                size = list(move.size)
                window = [0, 0, *size]
            else:
                part = _center(size, move.size) if kind == "CenterCrop" else move.get_params(_of_size(*size), move.size)
                window = list(part)
        return Drawn(self, pixels, _place(box, size, window, flip), (window[2], window[3]))

    def empty(self, size: tuple[int, int]) -> Tensor:
        """Return memory for a result of this height and width: float32 [3, h, w], or uint8 [h, w, 3]."""
        shape, dtype = ((3, *size), torch.float32) if self.mean else ((*size, 3), torch.uint8)
        return torch.empty(shape, dtype=dtype, device="cpu")


class Drawn:
    """Image and drawn numbers of a tail that is still to run. A sample holds it as a leaf.

    Args:
        tail: the tail.
        pixels: uint8 [H, W, 3].
        place: numbers of the image in the operator ``resample_images``.
        size: height and width of the result.
    """

    def __init__(self, tail: NativeTail, pixels: np.ndarray, place: list[int], size: tuple[int, int]) -> None:
        self.tail, self.pixels, self.place, self.size = tail, pixels, place, size


def run(images: Sequence[Drawn]) -> list[Tensor]:
    """Return the tensors [C, H, W] that tails make of their images, with the strides of torchvision.

    All cores work, but not in a process that was forked, where OpenMP could wait for threads of its parent.
    """
    results: dict[int, Tensor] = {}
    together = len(images) if os.getpid() == _PROCESS else 1
    for tail in {id(each.tail): each.tail for each in images}.values():
        members = [i for i, each in enumerate(images) if each.tail is tail]
        for begin in range(0, len(members), together):
            part = members[begin : begin + together]
            # Samples of torchvision share no memory. A user may keep one of them, or change it.
            made = [tail.empty(images[i].size) for i in part]
            torch.ops.flatout.resample_images(
                [torch.frombuffer(images[i].pixels, dtype=torch.uint8).view(images[i].pixels.shape) for i in part],
                [number for i in part for number in images[i].place],
                made,
                tail.mean,
                tail.std,
            )
            results.update(zip(part, made if tail.mean else [each.permute(2, 0, 1) for each in made], strict=True))
    return [results[i] for i in range(len(images))]


def native_tail(steps: Sequence[Callable[..., Any]]) -> NativeTail | None:
    """Return the native form of the first of some transforms; None if they are others, or if Pillow computes others."""
    kinds = [type(step).__name__ if _is_plain(step) else "" for step in steps]
    length = next((i for i, kind in enumerate(kinds) if kind not in _MOVES), len(kinds))
    moves, kinds = steps[:length], kinds[length:]
    order = [type(move).__name__ for move in moves]
    sizes = [kind for kind in order if kind != "RandomHorizontalFlip"]
    if (
        not sizes
        or "RandomHorizontalFlip" in order[: len(sizes)]  # a flip before a crop
        or any(kind in ("Resize", "RandomResizedCrop") for kind in sizes[1:])
        or len(sizes) > 2
        or (len(sizes) == 2 and sizes[0] != "Resize")
        or not all(map(_is_supported, moves))
        or not is_pillow_known()
    ):
        return None
    mean, std, count = [0.0] * 3, [1.0] * 3, length + 1
    if kinds[:1] == ["PILToTensor"]:
        mean = std = []
    elif kinds[:1] != ["ToTensor"] or torch.get_default_dtype() is not torch.float32:
        return None
    elif kinds[1:2] == ["Normalize"]:
        constants = _constants_of(steps[length + 1])
        if all(type(each) is list and len(each) == 3 for each in constants) and all(
            1e-18 <= value <= 1e18 for value in (*constants[1], *(abs(m) or 1.0 for m in constants[0]))
        ):
            mean, std = (np.asarray(each, np.float32).tolist() for each in constants)
            count = length + 2
    state = _state_of(steps[:count])
    has_hooks = state[0]
    return None if has_hooks else NativeTail(moves, mean, std, steps[:count], state)


def is_vertical_first(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return True if Pillow resizes columns before rows, as Pillow 13 does if the height shrinks much more."""
    return after[0] < before[0] and before[0] - after[0] > 2 * (before[1] - after[1])


@functools.cache
def is_pillow_known() -> bool:
    """Return True if the installed Pillow resizes like the native code. Other versions have another order of axes."""
    from PIL import Image

    pixels = np.random.default_rng(0)
    for height, width, *size in _PROBES:
        image = pixels.integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))
        place = _place([0, 0, height, width], size, [0, 0, *size], False)
        found = torch.empty((*size, 3), dtype=torch.uint8)
        torch.ops.flatout.resample_images([torch.from_numpy(image)], place, [found], [], [])
        if not np.array_equal(found.numpy(), expected):
            return False
    return True


def _place(box: Sequence[int], size: Sequence[int], window: Sequence[int], flip: bool) -> list[int]:
    return [*box, *size, *window[:2], flip, is_vertical_first(box[2:], size)]


def _is_plain(step: Any) -> bool:
    return type(step).__module__ == _MODULE


def _state_of(steps: Sequence[Any]) -> list[Any]:
    """Return all that the results of steps depend on: hooks, default dtype, code and constants, to be compared."""
    modules = torch.nn.modules.module
    hooks: list[Any] = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    hooks += [getattr(step, name, None) for step in steps for name in ("_forward_hooks", "_forward_pre_hooks")]
    functional, image = sys.modules["torchvision.transforms.functional"], sys.modules["PIL.Image"].Image
    code = [getattr(type(step), name, None) for step in steps for name in ("forward", "__call__", "get_params")]
    return [
        any(hooks),
        torch.get_default_dtype(),
        [getattr(functional, name) for name in _FUNCTIONS],
        [getattr(image, name) for name in _METHODS],
        code,
        [_constants_of(step) for step in steps if type(step).__name__ == "Normalize"],
    ]


def _constants_of(normalize: Any) -> tuple[Any, Any]:
    """Return ``mean`` and ``std`` of a ``Normalize``. Sequences, tensors and arrays become lists."""

    def listed(values: Any) -> Any:
        if isinstance(values, (Tensor, np.ndarray)):
            return values.tolist()
        return list(values) if isinstance(values, (list, tuple)) else values

    return listed(normalize.mean), listed(normalize.std)


def _is_supported(move: Any) -> bool:
    if type(move).__name__ in ("Resize", "RandomResizedCrop"):
        return getattr(move.interpolation, "value", None) == "bilinear" and move.antialias is not False
    return type(move).__name__ != "RandomCrop" or (move.padding is None and not move.pad_if_needed)


def _of_size(height: int, width: int) -> Tensor:
    """Return a stand-in for an image, for transforms that only ask for its size."""
    return torch.empty(3, height, width, device="meta")


def _resized(move: Any, height: int, width: int) -> list[int]:
    size = [move.size] if isinstance(move.size, int) else list(move.size)
    return sys.modules["torchvision.transforms.functional"]._compute_resized_output_size(
        (height, width), size, move.max_size
    )


def _center(size: Sequence[int], part: Sequence[int]) -> list[int]:
    top, left = (round((whole - inner) / 2.0) for whole, inner in zip(size, part, strict=True))
    return [top, left, *part]

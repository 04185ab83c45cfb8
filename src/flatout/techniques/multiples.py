"""Additional technique: layers whose sizes tensor cores cannot use fully."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flatout.mfu.peaks import multiplies_in_tf32
from flatout.techniques.base import Advice, NotApplicable
from flatout.training.autocast import autocast_dtype
from flatout.training.step_flops import share_of_flops

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

WORTH_NAMING = 0.01
"""Share of a step's FLOPs from which a layer is reported."""

_ALIGNED = 16  # bytes that a tensor core's instructions load at once
_TILE = 128  # bytes of a row in a tile, preferred if it costs little
_FIRST_LAYER = 4  # channels of an image: convolutions have kernels for these


@dataclass(frozen=True)
class Layer:
    """Layer with a size that tensor cores cannot use fully.

    Attributes:
        names: names in ``named_modules`` of the modules that share the layer's weight.
        kind: the class of the layer.
        sizes: name, value and next suitable value of each unsuitable size.
        multiple: suitable sizes are multiples of this.
    """

    names: tuple[str, ...]
    kind: str
    sizes: tuple[tuple[str, int, int], ...]
    multiple: int

    def __str__(self) -> str:
        sizes = " and ".join(f"{name} {size}: {better} would do" for name, size, better in self.sizes)
        return f"{', '.join(self.names)} ({self.kind}) has {sizes} (no multiple of {self.multiple})"


def multiple_of(dtype: torch.dtype, *, tf32: bool) -> int:
    """Return the divisor that sizes should have for products in a dtype.

    The result is 1 if tensor cores do not compute the dtype. Otherwise, it is the number of elements in 16 bytes: 8
    elements of 16 bits, 16 of 8 bits, 4 of float32 in TF32.
    """
    if dtype.itemsize > 4 or (dtype.itemsize == 4 and not tf32):
        return 1
    return _ALIGNED // dtype.itemsize


def better_size(size: int, multiple: int) -> int:
    """Return the next multiple, or the next whole tile if it is within 5 % of ``size``, such as 50304 for 50257."""
    tile = _round_up(size, multiple * _TILE // _ALIGNED)
    return tile if tile <= 1.05 * size else _round_up(size, multiple)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def odd_layers(model: nn.Module, autocast: torch.dtype | None, *, tf32: bool) -> list[Layer]:
    """Return the linear and convolution layers, and layers with shared weights, that tensor cores cannot use fully.

    Args:
        model: in any precision.
        autocast: dtype in which float32 layers compute; None without autocast.
        tf32: True if float32 products are computed in TF32.
    """
    sharing: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            sharing.setdefault(id(parameter), []).append(name or type(module).__name__)
    layers: dict[int, Layer] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or id(weight) in layers:
            continue
        dtype = autocast if autocast is not None and weight.dtype is torch.float32 else weight.dtype
        multiple = multiple_of(dtype, tf32=tf32)
        odd = tuple((name, size, better_size(size, multiple)) for name, size in _sizes(module) if size % multiple)
        if odd:
            layers[id(weight)] = Layer(tuple(sharing[id(weight)]), type(module).__name__, odd, multiple)
    return list(layers.values())


def _sizes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the sizes of a layer's matrix product with their names. An embedding is a look-up and has no product."""
    if isinstance(module, nn.Linear):
        yield "in_features", module.in_features
        yield "out_features", module.out_features
    if isinstance(module, _ConvNd) and module.groups == 1:
        if module.in_channels > _FIRST_LAYER:
            yield "in_channels", module.in_channels
        yield "out_channels", module.out_channels


class MultiplesOf8(Advice):
    """Names layers of sizes that the GPU's matrix units (tensor cores) cannot use fully, and the next that suit.

    When it helps: products in 16 bits need sizes that are multiples of 8, and products in 8 bits multiples of 16
    (NVIDIA, "Tips for Optimizing GPU Performance Using Tensor Cores", tip 1). Other sizes run on slower kernels. A
    vocabulary of 50304 instead of 50257 made nanoGPT about 25 % faster (A. Karpathy, 3 February 2023). When it hurts:
    the advice itself never does. A larger layer makes another model, with other checkpoints, so only its author can
    change it.
    """

    name = "multiples_of_8"
    title = "dimensions in multiples of 8"
    expected = "up to 25 %"

    def check(self, job: Job) -> None:
        """Require a GPU with tensor cores."""
        if job.spec.device.type != "cuda":
            raise NotApplicable("training runs on the CPU, which has no tensor cores")
        if torch.cuda.get_device_capability(job.spec.device) < (7, 0):
            raise NotApplicable(f"{torch.cuda.get_device_name(job.spec.device)} has no tensor cores")

    def findings(self, job: Job, pace: Pace, seconds: float) -> Sequence[str]:
        """Return the layers with a considerable share of the step's FLOPs."""
        layers = odd_layers(job.spec.model, autocast_dtype(job.spec.model), tf32=multiplies_in_tf32(job.spec.device))
        layers = [layer for layer in layers if _share(job, layer) >= WORTH_NAMING]
        if not layers:
            raise NotApplicable("every layer that takes a good part of the step has sizes that tensor cores can use")
        return [
            *map(str, layers),
            "What to do: make the layer larger (what is added, words that no text has, say, is learnt to be ignored), "
            "or choose another width.",
        ]


def _share(job: Job, layer: Layer) -> float:
    """Return the layer's share of a step's FLOPs; 1 if unknown."""
    shares = [share for name in layer.names if (share := share_of_flops(job.work, name)) is not None]
    return max(shares, default=1.0)

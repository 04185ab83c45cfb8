"""``Adam`` and ``AdamW``: torch's classes with a native step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.optim.native_step import NativeStep


class _NativeAdam(NativeStep):
    """Adam and its variants, in one native pass over parameter, gradient and moments."""

    _rule = "adam"

    def _streams(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _counts(self, group: dict[str, Any]) -> bool:
        return True

    def _options(self, group: dict[str, Any]) -> list[float | Tensor]:
        beta1, beta2 = group["betas"]
        return [beta1, beta2, group["eps"], group["decoupled_weight_decay"]]


class Adam(_NativeAdam, torch.optim.Adam):
    """Equals ``torch.optim.Adam`` with the same arguments, in one pass over memory.

    See :class:`AdamW` for the arithmetic and the additional options.
    """

    _torch_class = torch.optim.Adam


class AdamW(_NativeAdam, torch.optim.AdamW):
    """Equals ``torch.optim.AdamW`` with the same arguments, in one pass over memory.

    The arithmetic is in float32, or in float64 for float64 parameters. Results are rounded once, when parameters and
    moments are stored. ``foreach`` and ``fused`` are accepted and do not change the update. ``differentiable`` must be
    False. State keys and ``state_dict`` are torch's. During training, ``step`` counts are on the device of the
    parameters. DTensors (``fully_shard``, tensor parallel) are updated in place, with DTensors as state.

    A CUDA graph of ``step`` requires a learning rate that is a CUDA tensor, or ``capturable=True``. As in torch, each
    replay repeats all numbers of the capture, and reads a tensor again.

    The following options are additional. They apply to the optimizer or to one param group.

    Args:
        master_weights: ``"float32"`` keeps a float32 weight for each 16-bit parameter. The parameter is this weight,
            rounded. An in-place write to a parameter, as by ``p.copy_`` under ``torch.no_grad()``, also changes the
            weight, between replays of a CUDA graph too. A write through ``p.data`` cannot be detected, and is lost.
            ``"remainder"`` keeps only the 16 bits that a bfloat16 parameter lacks (12 bytes per parameter with float32
            moments), and refuses float16 parameters. Parameters with more than 16 bits have no master weights.
        moment_dtype: dtype of the moments. None: the dtype of the parameter, or float32 with master weights. Moments of
            float64 and complex parameters always have the dtype of the parameter. ``torch.uint8`` stores one byte per
            element, by the block-wise dynamic quantization of Dettmers et al., "8-bit Optimizers via Block-wise
            Quantization" (2022). The map is that of the paper, and a block has 256 elements. Values are computed in
            float32 and rounded to nearest. A positive second moment never becomes 0. One infinity or NaN makes its
            block NaN. Parameters of fewer than 4,096 elements keep float32 moments. With
            ``master_weights="remainder"``, a bfloat16 parameter takes 6 bytes in all. The state has a float32
            ``exp_avg_absmax`` of shape (ceil(numel / 256),) beside ``exp_avg``, and likewise for other moments. torch's
            classes would read the codes as plain numbers, so convert the optimizer with :func:`unfuse` first. DTensors
            are refused.
        stochastic_rounding: round bfloat16 parameters without master weights, and bfloat16 moments, up or down at
            random, without bias. Small updates then take effect on average.
        seed: seed of the random bits. The same seed, state and gradients give the same bits on any number of threads.
            Each part of a DTensor has different bits, which depend on how its mesh divides the DTensor. Replicas have
            the same bits.
        ema_decay: keep an average of each weight, which starts at the weight before the first step. After each step:
            ``average += (1 - ema_decay) * (weight - average)``. See :attr:`NativeStep.ema`.
        low_precision_copy: dtype of a copy of float32 parameters that the step also writes. See
            :meth:`NativeStep.copy_of`.
    """

    _torch_class = torch.optim.AdamW

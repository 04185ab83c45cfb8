"""``Adam`` and ``AdamW``: torch's classes with a native step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.optim.native_step import NativeStep


class _NativeAdam(NativeStep):
    """One native pass over parameter, gradient and moments, whatever the variant."""

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

    See :class:`AdamW` for what is computed how, and for the additional options.
    """

    _torch_class = torch.optim.Adam


class AdamW(_NativeAdam, torch.optim.AdamW):
    """Equals ``torch.optim.AdamW`` with the same arguments, in one pass over memory.

    Arithmetic is in float32 (float64 for float64 parameters), rounded once when parameters and moments are
    stored. ``capturable``, ``foreach`` and ``fused`` are accepted and make no difference; ``differentiable``
    must be False. State keys and ``state_dict`` are torch's; while training, ``step`` counts lie on the
    parameters' device. DTensors (``fully_shard``, tensor parallel) are stepped where they lie, with DTensors as state.

    Additional options, of the optimizer or of one param group:

    Args:
        master_weights: ``"float32"`` keeps a float32 weight for each 16-bit parameter; the parameter is that weight
            rounded. A parameter written in place, as by ``p.copy_`` under ``torch.no_grad()``, takes its weight along;
            a write through ``p.data`` is one that nobody can see, and is lost.
            ``"remainder"`` keeps only the 16 bits that a bfloat16 parameter lacks (12 bytes per parameter with
            float32 moments). Other parameters have none.
        moment_dtype: of the moments. None: the parameter's, or float32 with master weights. float64 and complex
            parameters keep theirs. ``torch.uint8``: a byte each, by the block-wise dynamic quantisation of Dettmers et
            al., "8-bit Optimizers via Block-wise Quantization" (2022), with the paper's map and blocks of 256 elements,
            computed in float32 and rounded to nearest; parameters of fewer than 4,096 elements keep float32 moments. A
            positive second moment never becomes 0; one infinity or NaN makes its block NaN. With
            ``master_weights="remainder"`` that is 6 bytes per bfloat16 parameter in all. State has a float32
            ``exp_avg_absmax`` of shape (ceil(numel / 256),) beside ``exp_avg``, and so on. torch's classes take
            such codes for numbers: :func:`unfuse` gives them their own. Not for DTensors.
        stochastic_rounding: round bfloat16 parameters without master weights, and bfloat16 moments, up or down at
            random, without bias: small updates then count on average.
        seed: of the random bits. The same seed, state and gradients give the same bits on any number of threads.
            Each part of a DTensor has bits of its own, which depend on how its mesh divides it; replicas have the same.
        ema_decay: average the weights: ``average += (1 - ema_decay) * (weight - average)`` after each
            step, starting at the weight before the first; see :attr:`NativeStep.ema`.
        low_precision_copy: have the step write a copy of float32 parameters in this dtype as well; see
            :meth:`NativeStep.copy_of`.
    """

    _torch_class = torch.optim.AdamW

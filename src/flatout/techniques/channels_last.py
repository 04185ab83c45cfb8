"""Additional technique: convolution weights in channels_last memory format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout.techniques.base import Effect, NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate

if TYPE_CHECKING:
    from flatout.training.job import Job

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


class ChannelsLastCandidate(Candidate):
    """Candidate that gives 2-d convolution weights and their moments channels_last strides, and reverts this.

    Convolutions give their outputs the memory format of the weight, so inputs need no conversion. They read the format
    from the strides, even if both formats have the same memory (one channel, 1x1 kernels). In this case ``to`` sets the
    strides, and ``contiguous`` does not. The weights' own storage is kept and used again afterwards, so other
    references to it stay valid.
    """

    label = "weights"
    value = True
    moves_storage = True

    def __init__(self, weights: list[nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._own: list[Tensor] = []

    def _turn_on(self) -> None:
        self._own = [weight.data for weight in self._weights]
        for weight in self._weights:
            weight.data = weight.data.to(memory_format=torch.channels_last)
            self._follow(weight, torch.channels_last)

    def _turn_off(self) -> None:
        for weight, own in zip(self._weights, self._own, strict=True):
            weight.data = own.copy_(weight.data)
            self._follow(weight, torch.contiguous_format)
        self._own = []

    def _follow(self, weight: nn.Parameter, memory_format: torch.memory_format) -> None:
        """Give gradient and moments the strides of their parameter, because fused updates read them as flat memory."""
        if weight.grad is not None:  # a new tensor, because DDP's gradient must stay a view of its bucket
            weight.grad = weight.grad.to(memory_format=memory_format)
        state = self._optimizer.state[weight] if self._optimizer and weight in self._optimizer.state else {}
        for tensor in state.values():
            if isinstance(tensor, Tensor) and tensor.shape == weight.shape:
                tensor.data = tensor.data.to(memory_format=memory_format)


class ChannelsLast(StepTechnique):
    """Stores images with all channels of a pixel side by side, the order that convolutions run best in.

    When it helps: convolutional nets, most of all in 16 bits on tensor cores. CPUs also profit if the format saves
    their convolution libraries a reordering. When it hurts: operators without a channels_last kernel convert back and
    forth. A ``view`` of an activation may fail with the new strides, which a trial detects. Dropout draws its mask in
    the order of memory, so the same seed gives another mask of the same distribution. Expected: PyTorch's tutorial on
    memory formats, for nets on a V100 under mixed precision.
    """

    name = "channels_last"
    title = "channels_last"
    expected = "8–35 %"
    rationale = "convolutions read and write their channels side by side, with no reordering in between"
    is_combinable = True
    recompiles = True
    reseeds = "dropout draws other masks of the same distribution"
    checks_evaluation = True
    changes_activations = True

    def effect_on(self, job: Job) -> Effect:
        """Return "reseeded" if a step draws random numbers, because torch draws them in the order of memory."""
        return "reseeded" if job.objective.draws else self.effect

    def check(self, job: Job) -> None:
        """Require a model with 2-d convolutions whose weights are in the default format.

        A training also requires its optimizer. Fused updates, including those of torch, read weights and moments in
        the order of memory, so moments must have the strides of their weight.
        """
        if not self._weights(job):
            raise NotApplicable("the model has no 2-d convolution with weights in the default memory format")
        if job.spec.optimizer is None and not job.spec.inference:
            raise NotApplicable("no optimizer was given to optimize(), and moments must follow the weights' strides")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the only candidate."""
        return [ChannelsLastCandidate(self._weights(job), job.spec.optimizer)]

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if there are convolutions and all of their weights are already in channels_last."""
        return any(isinstance(m, CONVOLUTIONS) for m in job.spec.model.modules()) and not self._weights(job)

    @staticmethod
    def _weights(job: Job) -> list[nn.Parameter]:
        weights = {
            id(m.weight): m.weight
            for m in job.spec.model.modules()
            if isinstance(m, CONVOLUTIONS) and type(m.weight) is nn.Parameter
        }
        return [w for w in weights.values() if w.is_contiguous() and w.stride() != _channels_last_strides(w)]


def _channels_last_strides(weight: Tensor) -> tuple[int, ...]:
    return torch.empty_like(weight, device="meta", memory_format=torch.channels_last).stride()

"""Additional technique: convolutions in channels_last memory format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv_transpose2d
from torch.utils import _pytree as pytree

from flatout.core.instance_class import class_change, instance_class
from flatout.techniques.base import Effect, NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate, ChangeCandidate

if TYPE_CHECKING:
    from flatout.training.job import Job

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def _channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images in channels_last. ``contiguous`` would not change the strides of one channel."""
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _with_own_gradient(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor whose gradient is contiguous, too, as a script expects that flattens gradients."""
    if not tensor.requires_grad or not tensor.is_contiguous():
        return tensor
    return tensor.narrow(0, 0, tensor.size(0))  # its backward makes a new gradient, in less time than two views


def _with_own_gradients(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias. Autograd visits the last made first: hooks of the weight run before those of the bias."""
    bias = None if bias is None else _with_own_gradient(bias)
    return _with_own_gradient(weight), bias


def _convolution_class(base: Any) -> type[nn.Module]:
    """Return a class of a convolution that converts its input. Outputs have the format of the input."""

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made: Tensor = base._conv_forward(self, _channels_last(input), *_with_own_gradients(weight, bias))
        return made

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
        )
        settings = self.stride, self.padding, padding, self.groups, self.dilation
        return conv_transpose2d(_channels_last(input), *_with_own_gradients(self.weight, self.bias), *settings)

    if issubclass(base, nn.Conv2d):
        return instance_class(base, _conv_forward=_conv_forward)
    return instance_class(base, forward=forward)


def _model_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a class of a model whose outputs and whose gradients of inputs are contiguous, as a script knows them."""

    def given(tensor: Tensor) -> Tensor:
        return _with_own_gradient(tensor) if tensor.dim() == 4 else tensor

    def returned(tensor: Tensor) -> Tensor:
        return tensor.contiguous() if tensor.dim() == 4 else tensor

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple([_mapped(given, arg) for arg in args])
        kwargs = {name: _mapped(given, arg) for name, arg in kwargs.items()}
        return _mapped(returned, base.forward(self, *args, **kwargs))

    return instance_class(base, forward=forward)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to all tensors of a value. A single tensor, the usual value, needs no search."""
    return function(value) if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, function, value)


def channels_last_candidate(model: nn.Module, convolutions: Sequence[nn.Module]) -> Candidate:
    """Return the candidate that gives convolutions a class that converts their inputs to channels_last.

    Weights, gradients and moments keep their strides, because scripts flatten them with ``view``. The first convolution
    converts its input, and the others receive channels_last from it.
    """
    makers = [*((module, _convolution_class) for module in convolutions), (model, _model_class)]
    return ChangeCandidate("activations", True, class_change(makers))


class ChannelsLast(StepTechnique):
    """Stores images with all channels of a pixel side by side, the order that convolutions run best in.

    When it helps: convolutional nets, most of all in 16 bits on tensor cores. CPUs also profit if the format saves
    their convolution libraries a reordering. When it hurts: operators without a channels_last kernel convert back and
    forth. Weights keep their strides, so that a convolution without channels_last kernels reorders them in each step. A
    ``view`` of an activation may fail with the new strides, which a trial detects. Dropout draws its mask in
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
        """Require a model with 2-d convolutions whose weights are in the default format."""
        if isinstance(job.spec.model, torch.jit.ScriptModule) or not self._convolutions(job):
            raise NotApplicable("the model has no 2-d convolution with weights in the default memory format")
        if "forward" in vars(job.spec.model):
            raise NotApplicable("the model's forward was replaced on the instance; its class's is not what runs")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the only candidate."""
        return [channels_last_candidate(job.spec.model, self._convolutions(job))]

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if there are convolutions and all of their weights are already in channels_last."""
        return any(isinstance(m, CONVOLUTIONS) for m in job.spec.model.modules()) and not self._convolutions(job)

    @staticmethod
    def _convolutions(job: Job) -> list[nn.Module]:
        found = [m for m in job.spec.model.modules() if isinstance(m, CONVOLUTIONS) and type(m.weight) is nn.Parameter]
        return [m for m in found if m.weight.is_contiguous() and m.weight.stride() != _channels_last_strides(m.weight)]


def _channels_last_strides(weight: Tensor) -> tuple[int, ...]:
    return torch.empty_like(weight, device="meta", memory_format=torch.channels_last).stride()

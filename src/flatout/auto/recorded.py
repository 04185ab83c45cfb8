"""Recorded training calls: what a script gave to a module, and the gradients that came back to its outputs.

The code between a module's output and the loss is the script's, and cannot be called again. Its effect on the module is
known, however: the loss, and its gradients at the outputs. Around the recorded outputs ``out0`` the loss is

    loss(out) = loss0 + <out - out0, gradients>

to first order. This function has the true value and the true gradients at the recorded parameters, and costs less than
any loss. It makes a module that is called several times, with several inputs or outputs, or that returns its loss, a
plain training: batches, and a loss of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.batches import cloned, map_tensors, tensors_of, tensors_within


@dataclass(eq=False)
class RecordedCall:
    """Call of a module in training.

    Attributes:
        args: positional arguments; tensors are copies without a graph.
        kwargs: keyword arguments, the same.
        gradients: gradient of the loss at each tensor of the output that requires one, by position, in fp32.
        product: sum of the products of these outputs with their gradients, 0-dim; None before a gradient came.
        is_reached: set to True by each gradient.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    product: Tensor | None = None
    is_reached: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
        """Return a call with copies of its arguments, to be made before the module may write to them."""
        return cls(*cloned(map_tensors(_detached, (args, kwargs))))

    def watched(self, output: Any) -> Any:
        """Note the gradients that will come to an output.

        One tensor of an output may be computed from another, as a loss is from logits. The gradient of the latter then
        also has a part from inside the module. Views receive the part from outside alone.

        Returns:
            The output for the script: the same, or with views of its tensors.
        """
        tensors = tensors_of(output)
        required = [tensor for tensor in tensors if tensor.requires_grad]
        if len(required) > 1 or any(tensor.is_leaf for tensor in required):
            output = map_tensors(lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, output)
            tensors = tensors_of(output)
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, position, tensor.detach()))
        return output

    def _note(self, position: int, output: Tensor, gradient: Tensor) -> None:
        """Add a gradient. It comes in several parts if the script runs several backwards."""
        gradient = gradient.detach().to(torch.float32, copy=True)
        product = (output.float() * gradient).sum()
        known = self.gradients.get(position)
        self.gradients[position] = gradient if known is None else known + gradient
        self.product = product if self.product is None else self.product + product
        self.is_reached = True

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the arguments."""
        return sum(t.nbytes for t in tensors_within([self.args, self.kwargs]))


def batch_of(calls: Sequence[RecordedCall], loss: Tensor) -> dict[str, Any]:
    """Return recorded calls as a batch for :func:`linearized_loss`.

    Args:
        calls: calls of one module that contribute to one loss, each with gradients.
        loss: the loss, 0-dim.
    """
    products = [call.product for call in calls if call.product is not None]
    return {
        "args": [call.args for call in calls],
        "kwargs": [call.kwargs for call in calls],
        "gradients": [dict(call.gradients) for call in calls],
        "offset": loss.detach().float() - torch.stack(products).sum(),
    }


def linearized_loss(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the loss of recorded calls, with the module's present parameters.

    Args:
        module: the module that was called.
        batch: a batch of :func:`batch_of`.

    Raises:
        ValueError: the outputs are not those that the gradients belong to.
    """
    products = []
    for args, kwargs, gradients in zip(batch["args"], batch["kwargs"], batch["gradients"], strict=True):
        outputs = tensors_of(module(*args, **kwargs))
        for position, gradient in gradients.items():
            if position >= len(outputs) or outputs[position].shape != gradient.shape:
                raise ValueError("the module's outputs have other shapes than in the recorded call")
            products.append((outputs[position].float() * gradient).sum())
    return torch.stack(products).sum() + batch["offset"]


def _detached(tensor: Tensor) -> Tensor:
    """Return a leaf over the same memory that requires a gradient if the tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)

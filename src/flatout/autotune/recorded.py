"""Recorded training calls of a module, with its inputs and the gradients of its outputs.

The code between a module's output and the loss belongs to the script, and cannot be called again. But its effect on the
module is known from the loss and the gradients at the outputs. Around the recorded outputs ``out0`` the loss is

    loss(out) = loss0 + <out - out0, gradients>

to first order. This function has the true value and the true gradients at the recorded parameters, and costs less than
any loss. So every module becomes a plain training with batches and a loss of each batch. The module may be called
several times, have several inputs or outputs, or return its loss.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from flatout.core.batches import batch_size_of, cloned, map_tensors, tensors_of, tensors_within
from flatout.core.python_state import parts_of
from flatout.core.reachable import reachable
from flatout.core.saved import nbytes_of
from flatout.core.snapshot import Snapshot

SCALED = 0.9
"""Threshold that shows scaled or clipped gradients.

The norm of an update's gradients is divided by the norm of the gradients of its backwards.
"""


@dataclass(eq=False)
class RecordedCall:
    """Call of a module in training.

    Attributes:
        args: positional arguments. Their tensors are copies without a graph.
        kwargs: keyword arguments, copied in the same way.
        autocast: device types and dtypes of the script's autocast around the call.
        gradients: gradient of the loss at each tensor of the output that requires one, by position, in fp32.
        product: sum of the products of these outputs with their gradients, 0-dim, or None before the first gradient.
        is_reached: True after a gradient has reached an output.
        is_differentiated_twice: True after a gradient with ``create_graph=True``, as for a gradient penalty.
        seconds: duration of the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    gradients: dict[int, Tensor] = field(default_factory=dict)
    product: Tensor | None = None
    is_reached: bool = False
    is_differentiated_twice: bool = False
    seconds: float = 0.0

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
        """Return a call with copies of its arguments. Call this before the module may write to the arguments."""
        enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
        autocast = tuple((device, torch.get_autocast_dtype(device)) for device in enabled)
        args, kwargs = cloned(map_tensors(_detached, (args, kwargs)))
        return cls(args, kwargs, autocast)

    def watched(self, output: Any) -> Any:
        """Register hooks that record the gradients of an output.

        One tensor of an output may be computed from another tensor of it, as a loss is from logits. The gradient of the
        logits then also has a part from inside the module. Views receive only the part from outside.

        Returns:
            The output for the script, which is the same object or has views of its tensors.
        """
        tensors = tensors_of(output)
        required = [tensor for tensor in tensors if tensor.requires_grad]
        if len(required) > 1 or any(tensor.is_leaf for tensor in required):
            output = _with_views(output, {})
            tensors = tensors_of(output)
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, position, tensor.detach()))
        return output

    def _note(self, position: int, output: Tensor, gradient: Tensor) -> None:
        """Add a gradient, or a part of one if the script runs several backwards.

        An error here, for example out of memory, would end the script's backward. So the call is discarded instead.
        """
        try:
            self._add(position, output, gradient)
        except RuntimeError:
            self.is_reached, self.product = False, None
            self.gradients.clear()

    def _add(self, position: int, output: Tensor, gradient: Tensor) -> None:
        self.is_differentiated_twice |= torch.is_grad_enabled()  # by create_graph=True
        gradient = gradient.detach().to(torch.float32, copy=True)
        product = (output.float() * gradient).sum()
        known = self.gradients.get(position)
        self.gradients[position] = gradient if known is None else known + gradient
        self.product = product if self.product is None else self.product + product
        self.is_reached = True

    @cached_property
    def nbytes(self) -> int:
        """Size of the arguments' tensors in bytes."""
        return sum(map(nbytes_of, tensors_within([self.args, self.kwargs])))


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
        "autocast": [call.autocast for call in calls],
        "gradients": [dict(call.gradients) for call in calls],
        "loss": loss.detach().float(),
        "offset": loss.detach().float() - torch.stack(products).sum(),
    }


def linearized_loss(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the loss of recorded calls, with the module's present parameters.

    Args:
        module: the module that was called.
        batch: a batch of :func:`batch_of`.

    Raises:
        ValueError: the outputs have other shapes than the gradients.
    """
    products = []
    if batch.get("is_written"):  # by the forward, as in a state that the script passes from call to call
        batch = batch | {"args": cloned(batch["args"]), "kwargs": cloned(batch["kwargs"])}
    calls = zip(*(batch[name] for name in ("args", "kwargs", "autocast", "gradients")), strict=True)
    for args, kwargs, autocast, gradients in calls:
        with ExitStack() as stack:
            for device, dtype in autocast:
                stack.enter_context(torch.autocast(device, dtype))
            outputs = tensors_of(module(*args, **kwargs))
        for position, gradient in gradients.items():
            if position >= len(outputs) or outputs[position].shape != gradient.shape:
                raise ValueError("the module's outputs have other shapes than in the recorded call")
            products.append((outputs[position].float() * gradient).sum())
    return torch.stack(products).sum() + batch["offset"]


class RecordedStep:
    """Loss of recorded calls for trials of loaders. The contents of the loader's batches are not used.

    Args:
        steps: for each batch of the loader, the recorded batches that the script computed with it.
    """

    def __init__(self, steps: Sequence[Sequence[dict[str, Any]]]) -> None:
        self._first = steps[0]
        self._by_size = {batch_size_of(step[0]): step for step in reversed(steps)}

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        """Return the loss of recorded calls with as many samples as ``batch``, if there are such calls."""
        step = self._by_size.get(batch_size_of(batch), self._first)
        return torch.stack([linearized_loss(module, recorded) for recorded in step]).sum()


def with_gradients_of_update(module: nn.Module, batches: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the batches of an update with the gradients that its optimizer received.

    A loss scaler, clipping of gradients and a division by the number of backwards change gradients after a backward.
    The factor is the norm of the present gradients, divided by their norm after the recorded backwards alone.

    Args:
        module: the module, which still has the gradients of the update.
        batches: its recorded calls, one batch for each backward.

    Returns:
        The batches with scaled gradients, or the same batches if the factor is not below ``SCALED``.

    Raises:
        Unrepeatable: the module's code cannot be repeated without a trace.
    """
    parameters = [p for p in module.parameters() if p.grad is not None]
    if not parameters:
        return batches
    seen = _gradient_norm(parameters)
    with _restored(module, batches):
        for parameter in parameters:
            parameter.grad = None
        for batch in batches:
            objects = [part for node in reachable([batch["args"], batch["kwargs"]]) for part in parts_of(node, 0)]
            versions = [(t, t._version) for t in tensors_within([batch["args"], batch["kwargs"]])]
            linearized_loss(module, batch).backward()
            is_written = any(part.changed() for part in objects) or any(t._version != v for t, v in versions)
            batch["is_written"] = is_written
        recorded = _gradient_norm(parameters)
    if not 0 < seen < SCALED * recorded:  # NaN included
        return batches
    return [_with_gradients_scaled(batch, seen / recorded) for batch in batches]


def _gradient_norm(parameters: Sequence[Tensor]) -> float:
    return float(get_total_norm([p.grad.float() for p in parameters if p.grad is not None]))


@contextmanager
def _restored(module: nn.Module, batches: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Restore a module, its recorded calls, and all that its code can reach, after the block.

    Raises:
        Unrepeatable: the code cannot be repeated without a trace.
    """
    snapshot = Snapshot.capture([module], code=[module, list(batches)])
    try:
        with snapshot.repeatable():
            yield
    finally:
        snapshot.restore_versions()
    snapshot.check()


def _with_gradients_scaled(batch: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a batch whose loss has the same value and ``factor`` times the gradients at the recorded parameters."""
    products = batch["loss"] - batch["offset"]
    gradients = [{i: factor * gradient for i, gradient in each.items()} for each in batch["gradients"]]
    return batch | {"gradients": gradients, "offset": batch["loss"] - factor * products}


def _with_views(output: Any, made: dict[int, Tensor]) -> Any:
    """Return an output with views in place of tensors that require gradients. Mappings stay the same object.

    A 0-dim tensor, such as a loss, is copied instead. A script may scale a loss in place, which would remove a view
    from its graph.

    Args:
        output: the module's result.
        made: receives the view or copy of each tensor, by the tensor's id.

    Raises:
        TypeError: an output of this type cannot be rebuilt.
    """
    if isinstance(output, MutableMapping):
        for key, value in list(output.items()):
            output[key] = _with_views(value, made)
        return output

    def apart(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor.view_as(tensor) if tensor.dim() else tensor.clone()
        return made[id(tensor)]

    again = map_tensors(apart, output)
    if type(again) is not type(output):
        raise TypeError(f"an output of type {type(output).__name__} cannot be recorded")
    return again


def _detached(tensor: Tensor) -> Tensor:
    """Return a leaf over the same memory that requires a gradient if the tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)

"""Recorder of a script's outermost module calls, losses and optimizer steps, and the training that they make.

The script does not change. ``Module.__call__`` and ``torch.autograd.backward`` are replaced by functions that record
the call and forward it. The owner of the recorder calls ``end_update`` after an optimizer has stepped.

The code between a module's output and the loss belongs to the script, and cannot be called again. But its effect on the
module is known from the loss and the gradients at the outputs. Around the recorded outputs ``out0`` the loss is

    loss(out) = loss0 + <out - out0, gradients>

to first order. This function has the true value and the true gradients at the recorded parameters, and costs less than
any loss. So every module becomes a plain training with batches and a loss of each batch. The module may be called
several times, have several inputs or outputs, or return its loss.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from flatout.core.batches import batch_size_of, cloned, map_tensors, tensors_of, tensors_within
from flatout.core.errors import parameters_of
from flatout.core.reachable import reachable
from flatout.core.replaced import replaced
from flatout.core.saved import nbytes_of, parts_of
from flatout.core.snapshot import Snapshot
from flatout.distributed.gradient_sync import GradientSync


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """Training calls that led to a step of an optimizer.

    Attributes:
        batches: the recorded calls of each module that holds some of the optimizer's parameters, one batch for each
            backward. Modules that are differentiated twice are left out, because compiled code cannot be differentiated
            twice.
        seconds: seconds of these calls, by module.
    """

    batches: Mapping[nn.Module, Sequence[dict[str, Any]]]
    seconds: Mapping[nn.Module, float]


@dataclass(eq=False)
class _Backward:
    """Loss of a backward, and the calls whose outputs received their first gradients in this backward, by module."""

    calls: weakref.WeakKeyDictionary[nn.Module, list[RecordedCall]]
    loss: Tensor


T = TypeVar("T")

MOST_BYTES = 1 << 30
"""Limit of the bytes of recorded calls that wait for a backward.

Above this limit, the oldest calls are dropped, and their modules are not recorded.
"""

MOST_CALLS = 256
"""Limit of the number of recorded calls that wait for a backward."""

MOST_BACKWARDS = 64
"""Limit of backwards without an update, as in a script that updates its weights by hand. The recording ends there."""


class Recorder:
    """Recorder of training calls until ``close``. A training call is a call with gradients of a module in train mode.

    Args:
        on_update: called with an optimizer and its update, after the step and before gradients are cleared.
        on_no_update: called when ``MOST_BACKWARDS`` have come without an update.
        on_failure: called with an error that has ended the recording. The script continues.
    """

    def __init__(
        self,
        on_update: Callable[[Optimizer, RecordedUpdate], object],
        on_no_update: Callable[[], object],
        on_failure: Callable[[Exception], object],
    ) -> None:
        self._on_update = on_update
        self._on_no_update = on_no_update
        self._on_failure = on_failure
        self._process = os.getpid()
        self._is_suspended = False
        self._thread = threading.local()
        self._calls: list[tuple[weakref.ref[nn.Module], RecordedCall]] = []  # the script may drop its modules
        self._dropped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._backwards: list[_Backward] = []
        self._stepped_by: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stack = ExitStack()
        self._stack.enter_context(replaced(nn.Module, "__call__", self._noting_calls))
        self._stack.enter_context(replaced(torch.autograd, "backward", self._noting_losses))

    def close(self) -> None:
        """Restore torch's functions."""
        self._is_suspended = True  # other code may have kept the functions of this recorder
        self._stack.close()
        self._calls.clear()
        self._backwards.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Record nothing inside the block."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    @property
    def _is_off(self) -> bool:
        """True while suspended, in a forked process, inside a backward, and under ``torch.func``.

        Activation checkpointing calls modules again inside a backward, and may run another backward there.
        """
        return (
            self._is_suspended
            or os.getpid() != self._process
            or torch._C._current_graph_task_id() != -1
            or torch._C._functorch.peek_interpreter_stack() is not None
        )

    def _noting_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        recorder, thread = self, self._thread

        # torch's profiler takes the local `self` of the code of `Module.__call__` for the module.
        @wraps(call)
        def noting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(thread, "is_called", False):
                return call(self, *args, **kwargs)
            if not (torch.is_grad_enabled() and self.training and _has_trainable(self)) or recorder._is_off:
                return call(self, *args, **kwargs)
            recorded = recorder._safely(RecordedCall.of, args, kwargs)
            if recorded is None:
                return call(self, *args, **kwargs)
            thread.is_called, begun = True, time.perf_counter()
            try:
                output = call(self, *args, **kwargs)
            finally:
                thread.is_called = False
            recorded.seconds = time.perf_counter() - begun
            watched = recorder._safely(recorded.watched, output)
            if watched is None or not any(tensor.requires_grad for tensor in tensors_of(output)):
                return output
            recorder._calls.append((weakref.ref(self), recorded))
            recorder._safely(recorder._drop_oldest)
            return watched

        return noting

    def _safely(self, function: Callable[..., T], *args: Any) -> T | None:
        """Return the result of a call, or end the recording if the call fails."""
        try:
            return function(*args)
        except Exception as error:
            self.close()
            self._on_failure(error)
            return None

    def _drop_oldest(self) -> None:
        """Drop old calls that no backward has reached, for example calls of an evaluation with gradients."""
        nbytes = sum(call.nbytes for _, call in self._calls)
        while len(self._calls) > 1 and (nbytes > MOST_BYTES or len(self._calls) > MOST_CALLS):
            reference, call = self._calls.pop(0)
            nbytes -= call.nbytes
            if (module := reference()) is not None:
                self._dropped.add(module)

    def _noting_losses(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def noting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            result = backward(tensors, *args, **kwargs)
            if not self._is_off:
                self._safely(self._note_backward, [tensors] if isinstance(tensors, Tensor) else list(tensors))
            return result

        return noting

    def _note_backward(self, losses: Sequence[Tensor]) -> None:
        """Record a backward with the calls that it reached.

        A backward that reaches only calls of an earlier backward adds its loss to the loss of the earlier one.
        """
        if self._stepped_by:
            self._backwards = []
            self._stepped_by.clear()
        loss = torch.stack([loss.detach().float().sum() for loss in losses]).sum()
        calls: weakref.WeakKeyDictionary[nn.Module, list[RecordedCall]] = weakref.WeakKeyDictionary()
        for reference, call in self._calls:
            if (module := reference()) is None:
                continue
            if call.is_differentiated_twice:
                self._dropped.add(module)
            if call.is_reached:
                calls.setdefault(module, []).append(call)
        self._calls = [(module, call) for module, call in self._calls if not call.is_reached]
        if calls and len(self._backwards) == MOST_BACKWARDS:
            self.close()
            self._on_no_update()
        elif calls:
            self._backwards.append(_Backward(calls, loss))
        elif self._backwards:
            self._backwards[-1].loss = self._backwards[-1].loss + loss

    def end_update(self, optimizer: Optimizer) -> None:
        """Record the end of an update. Call this after each step of an optimizer, before gradients are cleared.

        Two optimizers that step after the same backward share its calls. A subclass whose ``step`` calls the base's
        ``step`` fires torch's hook twice. The second time is ignored.
        """
        if self._backwards and not self._is_off and optimizer not in self._stepped_by:
            self._safely(self._pass_on, optimizer)

    def _pass_on(self, optimizer: Optimizer) -> None:
        self._stepped_by.add(optimizer)
        held = set(map(id, parameters_of(optimizer)))
        batches: weakref.WeakKeyDictionary[nn.Module, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        seconds: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
        for backward in self._backwards:
            for module, calls in backward.calls.items():
                if module not in self._dropped and any(id(p) in held for p in module.parameters()):
                    batches.setdefault(module, []).append(batch_of(calls, backward.loss))
                    seconds[module] = seconds.get(module, 0.0) + sum(call.seconds for call in calls)
        self._on_update(optimizer, RecordedUpdate(batches, seconds))


def _has_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


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


def with_gradients_of_update(
    module: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[dict[str, Any]],
    loss: Callable[[nn.Module, dict[str, Any]], Tensor] = linearized_loss,
    sync: GradientSync | None = None,
) -> Sequence[dict[str, Any]]:
    """Return the batches of an update with the gradients that its optimizer received.

    A loss scaler, clipping of gradients and a division by the number of backwards change gradients after a backward.
    The factor is the norm of the present gradients, divided by their norm after the recorded backwards alone. Gradients
    of parameters that the optimizer does not hold do not count, because a script may never scale or clear them.

    Args:
        module: the module, which still has the gradients of the update.
        optimizer: the optimizer that has stepped.
        batches: its recorded calls, one batch for each backward.
        loss: returns the loss of a batch.
        sync: averages gradients over the ranks of the training, or None for a single process.

    Returns:
        The batches with scaled gradients, or the same batches if the factor is not below ``SCALED``.

    Raises:
        Unrepeatable: the module's code cannot be repeated without a trace.
    """
    held = set(map(id, parameters_of(optimizer)))
    parameters = [p for p in module.parameters() if p.grad is not None and id(p) in held]
    if not parameters:
        return batches
    seen = _gradient_norm(parameters)
    with _restored(module, batches), nullcontext() if sync is None else sync.alone():
        for parameter in module.parameters():
            parameter.grad = None
        for batch in batches:
            objects = [part for node in reachable([batch["args"], batch["kwargs"]]) for part in parts_of(node, 0)]
            versions = [(t, t._version) for t in tensors_within([batch["args"], batch["kwargs"]])]
            loss(module, batch).backward()
            is_written = any(part.changed() for part in objects) or any(t._version != v for t, v in versions)
            batch["is_written"] = is_written
        if sync is not None:
            sync.reduce()
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

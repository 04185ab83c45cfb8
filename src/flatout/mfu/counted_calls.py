"""Training steps counted from a model's calls, backwards and updates, for ``MfuCounter.wrap``."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from flatout.core.batches import tensors_of
from flatout.core.instance_class import instance_class
from flatout.distributed.process_group import group_size
from flatout.mfu.flop_count import CountedWork, FlopCount, count_flops, is_counting
from flatout.mfu.ranges import nvtx_range
from flatout.native._host import PHASES, StepCounter

FORWARD, BACKWARD, UPDATE = map(PHASES.index, ("forward", "backward", "update"))

FlopsPerStep = Callable[[], float | FlopCount | None]
"""Function that returns the user's FLOPs of a step, or None if each call is counted."""


def count_calls(core: StepCounter, model: nn.Module, flops_per_step: FlopsPerStep) -> CountedCalls:
    """Count the training steps of ``model`` on ``core`` during the model's lifetime.

    Raises:
        TypeError: the model is a ``ScriptModule``.
        ValueError: the model is wrapped already.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("the calls of a ScriptModule cannot be seen: use counter.step in the loop instead")
    counted_by = getattr(type(model), "flatout_calls", None)
    if counted_by is not None and counted_by.are_of(model):  # a copy may share the class
        raise ValueError(f"this {type(model).__name__} is wrapped already")
    calls = CountedCalls(core, model, flops_per_step)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = super(counted, self).__call__
        if torch.compiler.is_compiling() or not calls.counts(self):
            return call(*args, **kwargs)
        return calls.forward(call, args, kwargs)

    counted = instance_class(type(model), __call__=__call__, flatout_calls=calls)
    model.__class__ = counted
    return calls


class OpenStep:
    """Step of one thread that has begun and not ended. A step has one or more forwards, then a backward."""

    def __init__(self, token: Any) -> None:
        self.token = token
        self.samples = self.tokens = 0
        self.flops: float | None = 0
        self.hardware_flops: float | None = 0
        self.in_forward = self.sees_backward = self.going_back = self.went_back = False
        self.leaf_hooks: list[RemovableHandle] = []

    def add(self, samples: int, tokens: int, flops: FlopCount | float | None) -> None:
        """Add a forward to the step. Unknown FLOPs of one forward make the step's FLOPs unknown."""
        model, hardware = model_and_hardware(flops)
        self.samples += samples
        self.tokens += tokens
        self.flops = None if self.flops is None or model is None else self.flops + model
        self.hardware_flops = (
            None if self.hardware_flops is None or hardware is None else self.hardware_flops + hardware
        )


class CountedCalls:
    """Training steps of a model, found from its calls. Each thread has at most one open step.

    A step begins with a forward. The step ends with its backward, or with an update between this backward and the
    next forward.
    """

    def __init__(self, core: StepCounter, model: nn.Module, flops_per_step: FlopsPerStep) -> None:
        self._core = core
        self._flops_per_step = flops_per_step
        self._model = weakref.ref(model)
        self._work = CountedWork(self._counted)
        self._steps: dict[int, OpenStep] = {}
        self._taking = threading.Lock()
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        _listen_to_updates()
        _listening.add(self)

    def __del__(self) -> None:
        self.settle()  # no call follows the last step of a deleted model

    def are_of(self, module: nn.Module) -> bool:
        """Return True if the counted calls belong to the module."""
        return module is self._model()

    def counts(self, module: nn.Module) -> bool:
        """Return True if a call of the module is part of a training step."""
        if not self.are_of(module) or is_counting() or _is_transformed():
            return False
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and any(step.going_back for step in list(self._steps.values())):
            return False  # activation checkpointing repeats the forward
        step = self._steps.get(threading.get_ident())
        if step is not None and step.in_forward:
            return False  # the model calls itself
        if module.training and torch.is_grad_enabled():
            return True
        self.settle()
        self._core.pause()  # an evaluation
        return False

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training forward, which begins a step or joins the open step."""
        self.settle()
        model, thread = self._model(), threading.get_ident()
        assert model is not None
        step = self._steps.get(thread)
        if step is not None and step.going_back:  # its backward failed
            self._drop(thread)
            step = None
        samples, tokens, flops = self._work(*args, **kwargs)
        if step is None:
            step = self._steps[thread] = OpenStep(self._core.begin())
        given = self._flops_per_step()
        step.add(samples, tokens, flops if given is None else given)
        self._core.mark(step.token, FORWARD)
        step.in_forward = True
        try:
            with nvtx_range("flatout.forward"):
                output = call(*args, **kwargs)
        except BaseException:
            self._drop(thread)
            raise
        finally:
            step.in_forward = False
        self._listen(step, output)
        if not step.sees_backward and not any(p.requires_grad for p in model.parameters()):
            self._drop(thread)  # a frozen model
        return output

    def _listen(self, step: OpenStep, output: Any) -> None:
        """Register hooks on the outputs that show when a backward reaches them."""
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        for tensor in outputs:
            handle = tensor.register_hook(lambda _: self._going_back(step))
            if tensor.is_leaf:  # a leaf lives longer than the step
                step.leaf_hooks.append(handle)
            if not tensor._is_view():  # a write into a view loses its hooks
                step.sees_backward = True

    def _going_back(self, step: OpenStep) -> None:
        """Mark the start of the backward, when it reaches the first output."""
        if not step.going_back:
            step.going_back = True
            self._core.mark(step.token, BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._gone_back(step))

    def _gone_back(self, step: OpenStep) -> None:
        self._core.touch(step.token)
        self._core.mark(step.token, UPDATE)
        step.going_back, step.went_back = False, True

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle an optimizer's step, if the optimizer updates this model.

        An update also ends a step whose backward no hook shows, for example of a model that returns a generator.
        """
        step = self._steps.get(threading.get_ident())
        if step is None or step.going_back or (step.sees_backward and not step.went_back):
            return
        if optimizer not in self._optimizers:
            model = self._model()
            own = set() if model is None else set(map(id, model.parameters()))
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._optimizers[optimizer] = not own.isdisjoint(held)
        if self._optimizers[optimizer]:
            self._core.touch(step.token)
            step.went_back = True

    def settle(self) -> None:
        """Hand the steps whose backward has ended to the core."""
        for thread, step in list(self._steps.items()):
            if step.went_back and not step.going_back and self._take(thread, step):
                self._core.finish(step.token, step.samples, step.tokens, step.flops, step.hardware_flops)

    def _drop(self, thread: int) -> None:
        step = self._steps.get(thread)
        if step is not None and self._take(thread, step):
            self._core.drop(step.token)

    def _take(self, thread: int, step: OpenStep) -> bool:
        """Remove a thread's step and its hooks.

        Returns:
            False if another thread has already removed the step. The step's thread may then have begun a new step.
        """
        with self._taking:
            if self._steps.get(thread) is not step:
                return False
            del self._steps[thread]
        for hook in step.leaf_hooks:
            hook.remove()
        return True

    def _counted(self, *args: Any, **kwargs: Any) -> FlopCount | None:
        if self._flops_per_step() is not None:
            return None
        model = self._model()
        assert model is not None
        if group_size() > 1:  # counting runs at different times in each process, so no process may wait for another
            raise RuntimeError("several processes train together: give MfuCounter flops_per_step")
        return count_flops(model, *args, **kwargs)


_listening: weakref.WeakSet[CountedCalls] = weakref.WeakSet()
"""Counted calls that react to updates."""


def is_wrapped(module: nn.Module) -> bool:
    """Return True if a counter counts the module's calls."""
    return any(calls.are_of(module) for calls in list(_listening))


def after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Report an update to all counted calls. The hook is registered when the first model is wrapped."""
    for calls in list(_listening):
        calls.updated(optimizer)


@functools.cache
def _listen_to_updates() -> None:
    """Register the only hook, which is never removed.

    A model may be collected while torch iterates its hooks. Removing a hook then would break the iteration.
    """
    register_optimizer_step_post_hook(after_update)


def _is_transformed() -> bool:
    """Return True if ``torch.jit.trace`` records the call, or ``torch.func`` transforms it."""
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


def model_and_hardware(flops: FlopCount | float | None) -> tuple[float | None, float | None]:
    """Return the FLOPs of the model and of the hardware, each None if unknown."""
    return (flops.total, flops.hardware) if isinstance(flops, FlopCount) else (flops, None)

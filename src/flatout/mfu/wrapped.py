"""A model whose calls count training steps by themselves: the inside of ``MfuCounter.wrap``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout._subclass import instance_class
from flatout.data.batch import batch_size_of, tensors_of, tokens_of
from flatout.mfu.flops import FlopCount, count_flops
from flatout.mfu.ranges import range
from flatout.mfu.reading import PHASES
from flatout.mfu.signatures import CountedFlops

if TYPE_CHECKING:
    from flatout.mfu.counter import MfuCounter

FORWARD, BACKWARD, UPDATE = map(PHASES.index, ("forward", "backward", "update"))


def count_calls(counter: MfuCounter, model: nn.Module) -> Calls:
    """Count the training steps of ``model`` on ``counter`` for as long as the model lives."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("the calls of a ScriptModule cannot be seen: use counter.step in the loop instead")
    if hasattr(type(model), "flatout_calls"):
        raise ValueError(f"this {type(model).__name__} is wrapped already")
    base = type(model)
    calls = Calls(counter, model)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not calls.counts(self):
            return base.__call__(self, *args, **kwargs)
        return calls.forward(lambda: base.__call__(self, *args, **kwargs), args, kwargs)

    model.__class__ = instance_class(base, __call__=__call__, flatout_calls=calls)
    return calls


class Calls:
    """What becomes of a model's calls; at most one step is under way.

    It begins with a forward. Where it ends shows only later: behind its backward, or behind an update if one follows
    before the next forward.
    """

    def __init__(self, counter: MfuCounter, model: nn.Module) -> None:
        self._counter = counter
        self._timer = counter._timer
        self._model = weakref.ref(model)
        self._flops = CountedFlops(self._counted)
        self._counting = False
        self._begin_anew()
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        this = weakref.ref(self)

        def behind_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            calls = this()
            if calls is not None:
                calls.updated(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(behind_update).remove)

    def _begin_anew(self) -> None:
        self._token: Any = None
        self._going = self._went_back = False
        self._samples = self._tokens = 0
        self._work: list[FlopCount | float | None] = []

    def counts(self, module: nn.Module) -> bool:
        """Whether a call of the module is part of a training step."""
        if self._counting or module is not self._model():  # a replica shares the class
            return False
        if module.training and torch.is_grad_enabled():
            return True
        self.settle()
        self._timer.pause()  # an evaluation
        return False

    def forward(self, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run a training forward, as the beginning of a step or as one more before its backward."""
        self.settle()
        flops = self._counter.flops_per_step
        self._work.append(self._flops(*args, **kwargs) if flops is None else flops)
        batch = (args, kwargs)
        self._samples += batch_size_of(batch) if tensors_of(batch) else 0
        self._tokens += tokens_of(batch)
        if self._token is None:
            self._token = self._timer.begin()
        self._timer.mark(self._token, FORWARD)
        try:
            with range("flatout.forward"):
                output = call()
        except BaseException:
            self._timer.drop(self._token)
            self._begin_anew()
            raise
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._going_back)
        return output

    def _going_back(self, gradient: Tensor) -> None:
        """The backward has reached what the model returned."""
        if self._token is None or self._counting or self._going:
            return
        self._going = True
        self._timer.mark(self._token, BACKWARD)
        torch.autograd.Variable._execution_engine.queue_callback(self._gone_back)

    def _gone_back(self) -> None:
        if self._token is not None:
            self._going, self._went_back = False, True
            self._timer.touch(self._token)
            self._timer.mark(self._token, UPDATE)

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped; it may be another model's."""
        if not self._went_back:
            return
        if optimizer not in self._optimizers:
            model = self._model()
            own = set() if model is None else set(map(id, model.parameters()))
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._optimizers[optimizer] = not own.isdisjoint(held)
        if self._optimizers[optimizer]:
            self._timer.touch(self._token)

    def settle(self) -> None:
        """Hand over the step under way, if its backward is done."""
        if self._went_back:
            self._timer.finish(self._token, self._samples, self._tokens, *_sum(self._work))
            self._begin_anew()

    def _counted(self, *args: Any, **kwargs: Any) -> FlopCount:
        model = self._model()
        assert model is not None
        self._counting = True
        try:
            return count_flops(model, *args, **kwargs)
        finally:
            self._counting = False


def model_and_hardware(flops: FlopCount | float | None) -> tuple[float | None, float | None]:
    """FLOPs of the model and of the hardware, None where not known."""
    return (flops.total, flops.hardware) if isinstance(flops, FlopCount) else (flops, None)


def _sum(parts: Iterable[FlopCount | float | None]) -> tuple[float | None, float | None]:
    """FLOPs of a step that consists of parts; None as soon as those of a part are not known."""
    model, hardware = zip(*map(model_and_hardware, parts), strict=True)
    return None if None in model else sum(model), None if None in hardware else sum(hardware)

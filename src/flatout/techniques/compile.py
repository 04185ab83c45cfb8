"""9: torch.compile, in place."""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.mfu.counting import is_counting
from flatout.techniques.base import NotApplicable, StepTechnique, Switch

if TYPE_CHECKING:
    from flatout.job import Job
    from flatout.report.model import Pace

COLD_COMPILE_SECONDS = 30.0
"""First forward and backward of small models with an empty cache, two cores: 28 to 35 s."""


RELEARN_AFTER = 50
"""Plain training calls with one and the same signature after which it is worth a compilation of its own."""


class CompiledCall:
    """Calls the compiled module for the inputs it was compiled for, and the plain module for all others.

    A last, smaller batch or an evaluation pass would otherwise stop training for a recompilation, half a minute
    long on a CPU, for one batch in an epoch. While ``learning``, new inputs are compiled for and remembered. Later,
    one signature that training turns out to use all the time (another call or mode than the trial's) is, too.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.learning = True
        self.plain_calls = 0
        self._module = module
        self._compiled = compiled
        self._known: set[Any] = set()
        self._plain: Counter[Any] | None = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_counting():
            return self._module._call_impl(*args, **kwargs)
        signature = (self._module.training, torch.is_grad_enabled(), *_signature(args, kwargs))
        if self.learning:
            self._known.add(signature)
        if signature in self._known:
            return self._compiled(*args, **kwargs)
        self.plain_calls += 1
        if self._plain is not None and torch.is_grad_enabled():
            self._plain[signature] += 1
            if self._plain[signature] == RELEARN_AFTER:
                self._known.add(signature)
                self._plain = None
        return self._module._call_impl(*args, **kwargs)


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a compilation is specialised on: the layout of the tensors, the other values, and autocast."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    described = tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, (bool, int, float, str, type(None)))
        else type(leaf)
        for leaf in leaves
    )
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    autocast = tuple(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in devices)
    return structure, described, autocast


def _entry(module: nn.Module) -> Callable[..., Any]:
    """The module's plain call behind a code object of its own.

    Dynamo counts recompilations by code object, and ``Module._call_impl`` is one for all modules of a process: the
    ninth model (a notebook cell run again and again) would silently run eager.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


class CompileSwitch(Switch):
    """Swaps the module's compiled call in and out; the module stays the same object with the same keys.

    It holds the call only while that is out of the module, so that nothing here keeps the model alive.
    """

    label = value = "default"

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._parked: Any = CompiledCall(model, torch.compile(_entry(model)))

    def _turn_on(self) -> None:
        self._swap()

    def _turn_off(self) -> None:
        self._swap()

    def freeze(self) -> None:
        """End the learning of new inputs: from here on only what was compiled in the trial runs compiled."""
        model = self._model()
        for call in (self._parked, None if model is None else model._compiled_call_impl):
            if isinstance(call, CompiledCall):
                call.learning = False

    def _swap(self) -> None:
        model = self._model()
        if model is not None:
            model._compiled_call_impl, self._parked = self._parked, model._compiled_call_impl


class Compile(StepTechnique):
    """Compiles the model with TorchInductor, in place (``state_dict`` keys and pickles do not change).

    When it helps: many small elementwise operators that fuse, and launch-bound GPU steps. When it hurts: the
    first step takes half a minute, inputs of changing shape compile again, and models that are a few large
    matrix products gain little. The report says after how many steps it has paid for itself.
    """

    name = "compile"
    number = 9
    title = "torch.compile"
    kept_because = "the model's operators run as fused, generated kernels"
    tolerance = 0.005
    draws_other_numbers = True
    optimistic_gain = 1.5

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """A cold compilation of a small model on two cores."""
        return COLD_COMPILE_SECONDS

    def check(self, job: Job) -> None:
        """A module that is neither compiled nor scripted already."""
        if isinstance(job.model, torch.jit.ScriptModule):
            raise NotApplicable("the model is a ScriptModule: it is compiled already")
        if isinstance(job.model, torch._dynamo.OptimizedModule) or job.model._compiled_call_impl is not None:
            raise NotApplicable("the model comes compiled already")

    def candidates(self, job: Job) -> Sequence[Switch]:
        """The default mode."""
        return [CompileSwitch(job.model)]

    def forced(self, job: Job, value: Any) -> Switch:
        """True or ``"default"``."""
        if value not in (True, "default"):
            raise ValueError(f"techniques['compile'] must be True, False or 'default', got {value!r}")
        return self.candidates(job)[0]

"""A call that takes another way where that is known to serve, and the plain way everywhere else.

What ``torch.compile`` and TorchScript have in common: which calls are alike, how such a call is put into a module, or
into the steps of a job, and taken out again, and what becomes of it when it fails in the middle of training.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.core import formatting
from flatout.core.out_of_memory import ran_out_of_memory
from flatout.mfu.counting import is_counting
from flatout.techniques.candidate import Candidate
from flatout.training.objective import Objective

if TYPE_CHECKING:
    from flatout.training.job import Job

PLAIN_VALUES = (bool, int, float, str, type(None))
"""What a signature holds as it is; of all else but tensors it knows the type alone."""


class Signature(NamedTuple):
    """What tells calls apart.

    Attributes:
        kind: everything but sizes: structure, dtypes, devices, memory formats, other values, autocast, gradients.
        shapes: the shape of every tensor.
    """

    kind: Hashable
    shapes: tuple[tuple[int, ...], ...]


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call. Gradients are part of it, ``inference_mode`` beside ``no_grad`` is not."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    described = tuple(
        (leaf.dim(), _layout(leaf), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, PLAIN_VALUES)
        else type(leaf)
        for leaf in leaves
    )
    autocast = tuple(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        for device in {t.device.type for t in tensors}
    )
    kind = (torch.is_grad_enabled(), structure, described, autocast)
    return Signature(kind, tuple(tuple(t.shape) for t in tensors))


def _layout(tensor: Tensor) -> Hashable:
    """The memory format; the strides of a tensor that has none."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return tensor.stride()


class RoutedCall(ABC):
    """Stands where ``Module.compile`` puts its result, or for a job's loss, and decides call by call which way it goes.

    Args:
        plain: the plain way.

    Attributes:
        learning: whether calls of a new kind are prepared for; what that raises is raised to the caller then.
        plain_calls: calls that went the plain way.
        failure: why it goes the plain way for good; empty while it does not.
    """

    title: str

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.learning = True
        self.plain_calls = 0
        self.failure = ""
        self._plainly = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_counting() or torch._C._get_tracing_state() is not None:
            return self._plainly(*args, **kwargs)
        way = None if self.failure else self._way(args, kwargs)
        if way is None:
            self.plain_calls += 1
            return self._plainly(*args, **kwargs)
        try:
            return way()
        except Exception as error:
            if self.learning or ran_out_of_memory(error):
                raise
            reason = formatting.first_line(error)
        output = self._plainly(*args, **kwargs)  # what is wrong with the call itself raises here as well
        self._give_up(reason)
        return output

    @abstractmethod
    def _way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The other way for this call; None where the plain one has to do."""

    def _give_up(self, reason: str) -> None:
        """Go the plain way from here on, and say so once."""
        self.failure = reason
        warnings.warn(f"{self.title} is off from here on, the model runs eager: {reason}", RuntimeWarning, stacklevel=2)


class CallCandidate(Candidate):
    """Puts a call into its owner and takes it out; a module stays the same object with the same keys.

    It holds the call only while that is out of its owner, so that nothing here keeps the model alive.

    Args:
        owner: whose call it is: a module, or the objective of a training.
        call: what takes the place of the plain call.
        slot: the owner's attribute for it, None in the owner's class.
    """

    def __init__(self, owner: nn.Module | Objective, call: RoutedCall, slot: str = "_compiled_call_impl") -> None:
        self._owner = weakref.ref(owner)
        self._slot = slot
        self._parked: RoutedCall | None = call

    @property
    def call(self) -> RoutedCall | None:
        """The call, wherever it is; None when it has gone with its owner, or was replaced by somebody else's."""
        inside = getattr(self._owner(), self._slot, None)
        return self._parked or (inside if isinstance(inside, RoutedCall) else None)

    @property
    def failure(self) -> str:  # type: ignore[override]
        """Why the call goes the plain way for good."""
        return "" if self.call is None else self.call.failure

    def _turn_on(self) -> None:
        owner = self._owner()
        if owner is not None and self._parked is not None:
            setattr(owner, self._slot, self._parked)
            self._parked = None

    def _turn_off(self) -> None:
        owner = self._owner()
        if isinstance(getattr(owner, self._slot, None), RoutedCall):  # not a compile() of the user's
            self._parked = vars(owner).pop(self._slot)

    def end_warmup(self) -> None:
        """End the learning of new inputs: from here on only what was prepared in the trial goes the other way."""
        if self.call is not None:
            self.call.learning = False


def routed_calls(job: Job) -> list[RoutedCall]:
    """What was put in the place of a job's loss, and of its model's call."""
    return [
        call for call in (job.objective.compiled, job.spec.model._compiled_call_impl) if isinstance(call, RoutedCall)
    ]


def comes_compiled(model: nn.Module) -> str:
    """Why a model that somebody else has compiled or scripted, or parts of, is left as it is; empty for others."""
    if isinstance(model, torch.jit.ScriptModule):
        return "the model comes as a ScriptModule: it is compiled already, and is trained as it is"
    if isinstance(model, torch._dynamo.OptimizedModule):
        return (
            "the model comes compiled already, and is trained as it is; the keys of its state_dict keep their "
            "_orig_mod. in front"
        )
    for name, module in model.named_modules():
        by_others = module._compiled_call_impl is not None and not isinstance(module._compiled_call_impl, RoutedCall)
        if by_others or isinstance(module, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)):
            part = f"the model's part {name!r}" if name else "the model"
            return f"{part} comes compiled already: it is trained as it is"
    return ""

"""Routed calls: a fast form for known inputs, and the plain call for all others.

``torch.compile`` and TorchScript share this code. It defines which calls are alike, and how a routed call is installed
and removed. After a failure during training, the plain call is used.
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
from flatout.core.batches import sizes_of, tensors_within
from flatout.core.errors import ran_out_of_memory
from flatout.core.torch_state import script_compiles
from flatout.mfu.flop_count import is_counting
from flatout.techniques.candidate import Candidate
from flatout.training.objective import Objective

if TYPE_CHECKING:
    from flatout.training.job import Job

PLAIN_VALUES = (bool, int, float, str, type(None))
"""Types whose values are part of a signature. Of other leaves except tensors, only the type counts."""


class Signature(NamedTuple):
    """Key that distinguishes calls.

    Attributes:
        kind: everything except sizes: structure, dtypes, devices, memory formats, other values, autocast, gradients.
        shapes: the shape of every tensor.
        has_graph: True if a tensor requires a gradient.
    """

    kind: Hashable
    shapes: tuple[tuple[int, ...], ...]
    has_graph: bool


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return the signature of a call.

    Gradient mode is part of the signature; ``inference_mode`` and ``no_grad`` count as one.
    """
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
    return Signature(kind, tuple(map(sizes_of, tensors)), any(t.requires_grad for t in tensors))


def _layout(tensor: Tensor) -> Hashable:
    """Return the memory format of a tensor, or its strides if it has no format."""
    if tensor.is_nested:
        return tensor.layout
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return tensor.stride()


class RoutedCall(ABC):
    """Replacement for a module's call or a job's loss, which chooses a form for each call.

    The replacement is stored in the attribute that ``Module.compile`` uses, or as the job's loss.

    Args:
        plain: the plain call.

    Attributes:
        learning: True to prepare calls of a new kind. Errors of the preparation reach the caller.
        plain_calls: number of calls that took the plain form.
        failure: reason why all calls take the plain form; empty without a failure.
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
        output = self._plainly(*args, **kwargs)  # an error of the call itself is raised again here
        self._give_up(reason)
        return output

    @abstractmethod
    def _way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """Return the fast form of this call; None for the plain call."""

    def _give_up(self, reason: str) -> None:
        """Use the plain form for all later calls, and warn once."""
        self.failure = reason
        warnings.warn(f"{self.title} is off from here on, the model runs eager: {reason}", RuntimeWarning, stacklevel=2)


class CallCandidate(Candidate):
    """Candidate that replaces a call of a module or of an objective, and restores the original call.

    The owner stays the same object, and a module keeps its ``state_dict`` keys. The candidate holds the call only while
    the call is removed, so that the candidate does not keep the model alive.

    Args:
        owner: the owner of the call: a module, or the objective of a training.
        call: the replacement of the plain call.
        slot: the owner's attribute for the call. It is None in the owner's class.
    """

    def __init__(self, owner: nn.Module | Objective, call: RoutedCall, slot: str = "_compiled_call_impl") -> None:
        self._owner = weakref.ref(owner)
        self._slot = slot
        self._parked: RoutedCall | None = call

    @property
    def call(self) -> RoutedCall | None:
        """Routed call, installed or not; None if its owner is gone or other code has replaced the call."""
        inside = getattr(self._owner(), self._slot, None)
        return self._parked or (inside if isinstance(inside, RoutedCall) else None)

    @property
    def failure(self) -> str:  # type: ignore[override]
        """Reason why all calls take the plain form; empty without a failure."""
        return "" if self.call is None else self.call.failure

    def _turn_on(self) -> None:
        owner = self._owner()
        if owner is not None and self._parked is not None:
            setattr(owner, self._slot, self._parked)
            self._parked = None

    def _turn_off(self) -> None:
        owner = self._owner()
        if isinstance(getattr(owner, self._slot, None), RoutedCall):  # not the user's own compile()
            self._parked = vars(owner).pop(self._slot)

    def end_warmup(self) -> None:
        """End the learning of new inputs. From now on, only inputs of the trial take the fast form."""
        if self.call is not None:
            self.call.learning = False


def why_sizes_vary(job: Job) -> str:
    """Return the reason why no code for fixed sizes can serve the trial's batches; empty if there is none."""
    is_nested = any(tensor.is_nested for batch in job.data.batches for tensor in tensors_within(batch))
    return "the batches hold nested tensors, whose sizes differ from batch to batch" if is_nested else ""


def routed_calls(job: Job) -> list[RoutedCall]:
    """Return the routed calls of a job's loss and of its model."""
    return [
        call for call in (job.objective.compiled, job.spec.model._compiled_call_impl) if isinstance(call, RoutedCall)
    ]


def has_compiled_code(job: Job) -> bool:
    """Return True if the script or the job calls code that ``torch.compile`` has made."""
    return script_compiles() or any(call.title == "torch.compile" for call in routed_calls(job))


def comes_compiled(model: nn.Module) -> str:
    """Return the reason to keep a model that is compiled or scripted, in whole or in part; empty for other models."""
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

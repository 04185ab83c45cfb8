"""Gradients of gradients of compiled code, which torch cannot compute (2.14). The plain call computes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.core.errors import Unsuitable
from flatout.training.micro_batches import buffers_of

_CALL = "flatout_call"


@dataclass(eq=False)
class DifferentiableCall:
    """Compiled call, whose backward with ``create_graph=True`` computes the call again by the plain code.

    Attributes:
        plain: the plain call.
        modules: modules with the modes and the buffers of the call.
        args: positional arguments.
        kwargs: keyword arguments.
        outputs: for each differentiable output of the compiled node its position in the output of the call, and True if
            this output is a view of it.
        on_use: called after the plain call was used.
    """

    plain: Callable[..., Any]
    modules: Sequence[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: dict[int, tuple[int, bool]]
    on_use: weakref.WeakMethod[Callable[[], object]]

    def __post_init__(self) -> None:
        devices = ("cpu", "cuda")
        self._autocast = [(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)]
        self._modes = [m.training for m in self.modules]

    def gradients(self, node: Any, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the compiled node's inputs, with a graph.

        Args:
            node: the compiled node.
            given: gradients of the node's outputs.
        """
        _ = node.saved_tensors  # raises if the graph was freed, or if a tensor has changed since the forward
        leaves = pytree.tree_leaves(self._outputs())
        pairs = []
        for number, (position, is_base) in self.outputs.items():
            output, gradient = leaves[position], given[number]
            if gradient is not None:
                pairs.append((output._base if is_base else output, gradient))
        wanted = _inputs_of(node, self.args, self.kwargs)
        assert wanted is not None
        known = [t for t in wanted if t is not None]
        outputs, gradients = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, known, gradients, create_graph=True, allow_unused=True))
        if (on_use := self.on_use()) is not None:
            on_use()
        return tuple([None if t is None else next(found) for t in wanted])

    def _outputs(self) -> Any:
        """Run the plain call in the modes of the recorded call, on copies of the buffers, which are updated already."""
        slots = [buffers_of(part) for module in self.modules for part in module.modules() if len(part._buffers)]
        buffers, modes = [dict(own) for own in slots], [m.training for m in self.modules]
        with ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype))
            try:
                for own in slots:
                    own.update({name: None if buffer is None else buffer.clone() for name, buffer in own.items()})
                for module, mode in zip(self.modules, self._modes, strict=True):
                    module.training = mode
                return self.plain(*self.args, **self.kwargs)
            finally:
                for own, before in zip(slots, buffers, strict=True):
                    own.update(before)
                for module, mode in zip(self.modules, modes, strict=True):
                    module.training = mode


def attach(
    output: Any,
    plain: Callable[..., Any],
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_use: Callable[[], object],
) -> None:
    """Prepare the node of a compiled call for a backward with ``create_graph=True``.

    An output without such a node is left alone. Under a dispatch mode, for example, Dynamo runs the plain code.
    """
    leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
    node: Any = None
    outputs: dict[int, tuple[int, bool]] = {}
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.grad_fn is None:
            continue
        is_base = not _is_compiled(leaf.grad_fn)
        raw = leaf._base if is_base else leaf
        if raw is not None and _is_compiled(raw.grad_fn):
            node = raw.grad_fn
            outputs[raw.output_nr] = position, is_base
    if node is not None:
        _patch(node._forward_cls)
        setattr(node, _CALL, DifferentiableCall(plain, modules, args, kwargs, outputs, weakref.WeakMethod(on_use)))


def check(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check new compiled code, after ``attach``.

    Raises:
        Unsuitable: the call has several compiled parts, whose gradients cannot be differentiated again.
    """
    compiled = [node for node in _nodes_of(output, (args, kwargs)) if _is_compiled(node)]
    if len(compiled) > 1 or any(
        not hasattr(node, _CALL) or _inputs_of(node, args, kwargs) is None for node in compiled
    ):
        raise Unsuitable(
            "Dynamo makes several parts of the model, whose gradients your loop could not differentiate again"
        )


def check_loss(loss: Any) -> None:
    """Check new compiled code of a whole loss.

    Raises:
        Unsuitable: the loss depends on gradients of compiled code, which cannot be differentiated again.
    """
    if any(type(node).__name__ == "CompiledFunctionBackwardBackward" for node in _nodes_of(loss, ())):
        raise Unsuitable("the loss differentiates a gradient again, which compiled code cannot do")


def _nodes_of(output: Any, given: Any) -> list[Any]:
    """Return the nodes of the graph from ``output`` to the tensors in ``given`` and to leaves."""
    left: list[Any] = [leaf.grad_fn for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None, *(t.grad_fn for t in pytree.tree_leaves(given) if isinstance(t, Tensor))}
    found = []
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            left += [function for function, _ in node.next_functions]
    return found


def _inputs_of(node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None] | None:
    """Return the tensors at the node's inputs, or None if one is neither a leaf nor an argument."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    found: list[Tensor | None] = []
    for function, number in node.next_functions:
        if function is None:
            found.append(None)
        elif hasattr(function, "variable"):
            found.append(function.variable)
        else:
            same = [t for t in given if t.grad_fn is function and t.output_nr == number]
            if not same:
                return None
            found.append(same[0])
    return found


def _is_compiled(node: Any) -> bool:
    return hasattr(getattr(node, "_forward_cls", None), "_double_backward")


def _patch(function: Any) -> None:
    """Make the backward of a compiled function use the plain call if its gradients get a graph."""
    if hasattr(function, _CALL):
        return
    setattr(function, _CALL, True)
    function.metadata.bw_donated_idxs = []  # no buffer was donated, so that a graph may be retained
    backward = function.backward

    def plain_if_twice(node: Any, *gradients: Any) -> Any:
        call = getattr(node, _CALL, None)
        if not torch.is_grad_enabled() or not isinstance(call, DifferentiableCall):
            return backward(node, *gradients)
        given = gradients[0] if len(gradients) == 1 and isinstance(gradients[0], list) else gradients
        return call.gradients(node, given)

    function.backward = staticmethod(plain_if_twice)

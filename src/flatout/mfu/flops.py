"""``count_flops``: the FLOPs of a model or of any callable, from the operators that run, by exact formulas."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.random_state import RandomState
from flatout.core.saved import ModuleSlots, SavedTensor
from flatout.mfu.cost import is_abstract
from flatout.mfu.counting import Counting
from flatout.mfu.flop_count import FlopCount, named

# What is replaced for the time of a count is the whole process's: the stance of torch.compile, hooks, a function.
taking_turns = threading.RLock()


def count_flops(fn: Callable[..., Any], *inputs: Any, backward: bool = True, **keywords: Any) -> FlopCount:
    """Counts the FLOPs of ``fn(*inputs, **keywords)``, and of the backward from what it returns.

    What counts is work like a matrix product: products, convolutions, attention, recurrent layers; see
    ``FlopCount.unknown`` for what was seen and not counted. It is always the eager code that is counted: what
    ``torch.compile`` made is neither used nor made, in the whole process while a count lasts; counts in several
    threads take turns. What a forward does in threads of its own (``nn.DataParallel`` on several GPUs) is not seen.
    Meta and fake tensors are counted without computing.

    Attention: ``is_causal`` counts the keys 0..i of query i on every backend, also where torch computes all and
    masks; ``FlopCount.dense`` has the other convention. A mask given as a tensor (padding, a sliding window) removes
    nothing, since the kernels compute every score; the windows of flash attention and the blocks of a
    ``BlockMask`` do.

    Args:
        fn: a module: its forward, then a backward from the floating-point results that are found in tuples, lists,
            mappings and dataclasses: from the scalars, if there are any (they are the loss), else from all.
            Parameters, gradients, buffers, random generators and inputs are afterwards as they were, also those
            of modules that it calls without owning them. Any other callable: what it does, with whatever that
            changes, except for the random generators.
        inputs: its arguments.
        backward: whether a module is counted with its backward. There is none where gradients are disabled.
        keywords: its keyword arguments.

    Returns:
        The count.

    Warns:
        RuntimeWarning: once, naming the operators of ``FlopCount.unknown``.
    """
    original = getattr(fn, "_orig_mod", fn)
    model = original if isinstance(original, nn.Module) else None
    counting = Counting(model)
    with taking_turns, contextlib.ExitStack() as stack:
        stack.callback(RandomState.capture().restore)
        if model is not None:
            inputs, keywords = _detached((inputs, keywords), {})
            stack.enter_context(_untouched(model))
            counting.adopted = lambda module: stack.enter_context(_untouched(module))
        stack.enter_context(eager())
        with counting:
            result = original(*inputs, **keywords)
            if model is not None and backward:
                _backward(result)
    count = counting.count()
    if count.unknown:
        warnings.warn(
            f"FLOPs of these operators are not known and count 0: {named(count.unknown)}; "
            "flatout.mfu.register_flops gives them a formula",
            RuntimeWarning,
            stacklevel=2,
        )
    return count


def _detached(value: Any, seen: dict[int, Tensor]) -> Any:
    """A copy that the call may change and the backward may end in; one tensor given twice stays one."""

    def copied(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return seen[id(tensor)]

    return torch.utils._pytree.tree_map(copied, value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from _tensors(getattr(value, entry.name))


def _backward(result: Any) -> None:
    outputs = [t for t in _tensors(result) if t.requires_grad]
    losses = [t for t in outputs if t.dim() == 0] or outputs
    if losses:
        with _gradients_aside(_leaves(losses)):
            torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])


def _leaves(results: list[Tensor]) -> list[Tensor]:
    """What a backward from these leaves gradients in, whoever it belongs to."""
    leaves, seen = [], set()
    nodes: list[Any] = [result.grad_fn for result in results]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes.extend(following for following, _ in node.next_functions)
    return leaves


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Puts gradients, buffers and modes back."""
    slots = ModuleSlots(module)
    buffers = [SavedTensor(b) for b in module.buffers() if _is_comparable(b)]
    try:
        with _gradients_aside(list(module.parameters())):
            yield
    finally:
        slots.restore()
        for saved in buffers:
            # Batch norm writes without a new version number; a needless write breaks graphs that hold the buffer.
            if saved.has_changed():
                saved.restore()


def _is_comparable(buffer: Tensor) -> bool:
    """Not what has no bits, nor sparse, nested and 4-bit tensors: torch cannot compare them, and layers leave them."""
    plain = buffer.layout == torch.strided and not buffer.is_nested and buffer.dtype != torch.float4_e2m1fn_x2
    return plain and not is_abstract(buffer)


@contextlib.contextmanager
def _gradients_aside(leaves: list[Tensor]) -> Iterator[None]:
    """Puts gradients back, and keeps the hooks of finished gradients from stepping an optimizer."""
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    hooks = [(leaf._post_accumulate_grad_hooks, dict(leaf._post_accumulate_grad_hooks))
             for leaf in leaves if leaf._post_accumulate_grad_hooks]  # fmt: skip
    for registered, _ in hooks:
        registered.clear()
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for registered, saved in hooks:
            registered.update(saved)
        for leaf, gradient in gradients:
            leaf.grad = gradient


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Compiled functions and modules run their eager code, and keep what was compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # torch.compile(module) inside another one is seen as a module of its own: nothing is counted twice.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks", UserWarning)
        yield

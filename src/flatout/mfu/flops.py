"""FLOPs of a model or of any callable, counted by exact formulas from the operators that run."""

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

# A count changes the stance of torch.compile, module hooks and the SDPA function in the whole process.
taking_turns = threading.RLock()


def count_flops(fn: Callable[..., Any], *inputs: Any, backward: bool = True, **keywords: Any) -> FlopCount:
    """Count the FLOPs of ``fn(*inputs, **keywords)`` and of its backward.

    Matrix products, convolutions, attention and recurrent layers count. ``FlopCount.unknown`` lists operators that may
    be costly and do not count. A count runs eager code only, so ``torch.compile`` is disabled in the whole process
    during the count. Counts in several threads take turns. Work in threads that a forward starts, as
    ``nn.DataParallel`` does, is not counted. Meta and fake tensors are counted without computing.

    With ``is_causal``, the keys 0..i of query i count on every backend, even if torch computes all pairs and masks
    them. ``FlopCount.dense`` counts all pairs. A mask tensor (padding, a sliding window) removes no pair, because the
    kernels compute every score. The windows of flash attention and the blocks of a ``BlockMask`` remove pairs.

    Args:
        fn: module or other callable. A module runs its forward, then a backward from the scalars of its result. If
            there is no scalar, the backward starts from all tensors of the result that require a gradient. The count
            finds tensors in tuples, lists, mappings and dataclasses. The count restores parameters, gradients, buffers,
            random generators and inputs, and the same for other modules that the module calls. For any other callable,
            the count restores only the random generators.
        inputs: positional arguments of ``fn``.
        backward: also run the backward of a module, unless gradients are disabled.
        keywords: keyword arguments of ``fn``.

    Returns:
        The count.

    Warns:
        RuntimeWarning: once, with the names of the operators in ``FlopCount.unknown``.
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
    """Return a copy that the call and the backward may change. A tensor that occurs twice is copied once."""

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
    """Return the tensors in which a backward from the results accumulates gradients."""
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
    """Restore the module's gradients, buffers and modes after the block."""
    slots = ModuleSlots(module)
    buffers = [SavedTensor(b) for b in module.buffers() if _is_comparable(b)]
    try:
        with _gradients_aside(list(module.parameters())):
            yield
    finally:
        slots.restore()
        for saved in buffers:
            # Version counters do not show the writes of batch norm. An unnecessary write breaks graphs that hold the
            # buffer.
            if saved.has_changed():
                saved.restore()


def _is_comparable(buffer: Tensor) -> bool:
    """Return True if torch can compare the buffer. Layers do not change sparse, nested and 4-bit buffers."""
    plain = buffer.layout == torch.strided and not buffer.is_nested and buffer.dtype != torch.float4_e2m1fn_x2
    return plain and not is_abstract(buffer)


@contextlib.contextmanager
def _gradients_aside(leaves: list[Tensor]) -> Iterator[None]:
    """Restore gradients after the block, and disable hooks that would step an optimizer in the block."""
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
    """Run the eager code of compiled functions and modules in the block, and keep the compiled code."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # A torch.compile(module) inside another module is a separate module here, so nothing counts twice.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks", UserWarning)
        yield

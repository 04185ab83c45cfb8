"""``count_flops``: the FLOPs of a model or of any callable, from the operators that run, by exact formulas."""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from flatout.data.generators import RandomState
from flatout.measure.state import ModuleSlots
from flatout.mfu.formulas import (
    Cost,
    causal_pairs,
    cost_of,
    has_formula,
    higher_order_cost,
    is_abstract,
    is_cheap,
)

# What is replaced for the time of a count is the whole process's: the stance of torch.compile, hooks, a function.
taking_turns = threading.RLock()


@dataclass(frozen=True)
class FlopNode:
    """FLOPs of one module, those of its submodules included.

    A module that is used several times, or under several names, is one node: its first name. Its backward is that of
    the operators that ran in its forward.

    Attributes:
        name: the module's name in its parent; the class for a root.
        forward: FLOPs of its forward.
        backward: FLOPs of its backward.
        recomputed: FLOPs that were computed again (see ``FlopCount``).
        children: its submodules, in order of registration.
    """

    name: str
    forward: int
    backward: int
    recomputed: int
    children: tuple[FlopNode, ...]

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def own(self) -> int:
        """``total`` without that of the submodules."""
        return self.total - sum(child.total for child in self.children)

    def __getitem__(self, path: str) -> FlopNode:
        """The submodule of that dotted name, such as ``layer1.0.conv1``.

        Raises:
            KeyError: if there is none.
        """
        node, rest = self, path
        while rest:
            for child in node.children:
                if rest == child.name or rest.startswith(f"{child.name}."):
                    node, rest = child, rest[len(child.name) + 1 :]
                    break
            else:
                raise KeyError(f"no module {path!r} in {self.name}")
        return node

    def __str__(self) -> str:
        """An indented tree of the modules that compute: total, share of the root, forward and backward."""
        rows = list(self._rows(0))
        width = max(len(name) for name, _ in rows)
        whole = max(self.total, 1)
        return "\n".join(
            f"{name:{width}}  {_readable(node.total):>9} {node.total / whole:7.1%}"
            f"  forward {_readable(node.forward):>9}  backward {_readable(node.backward):>9}"
            for name, node in rows
        )

    def _rows(self, depth: int) -> Iterator[tuple[str, FlopNode]]:
        yield "  " * depth + self.name, self
        for child in self.children:
            if child.total or child.recomputed:
                yield from child._rows(depth + 1)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call; a multiply-add is 2.

    ``total`` is what the model's mathematics needs and what MFU is made of; ``hardware`` is what the device computes
    and what HFU is made of. Pairs of query and key that ``is_causal`` removes are in neither.

    Attributes:
        forward: FLOPs of the forward.
        backward: FLOPs of the backward.
        recomputed: FLOPs of what was computed before: forwards that activation checkpointing repeats, as far as it
            does (torch stops at the last tensor that the backward needs), and the scores that a fused attention
            computes again in its backward.
        dense: ``total`` with causal attention counted as if nothing were masked, as published figures have it
            (the 12 * L * H * Q * T of PaLM's appendix B).
        by_module: the same by module.
        by_op: by operator: ``forward + backward + recomputed``.
        unknown: operators that may be costly and have no formula, with the number of their calls. They count 0 in
            everything above; ``register_flops`` gives them a formula.
    """

    forward: int
    backward: int
    recomputed: int
    dense: int
    by_module: FlopNode
    by_op: Mapping[str, int]
    unknown: Mapping[str, int]

    @functools.cached_property
    def total(self) -> int:
        """Model FLOPs: forward and backward, nothing twice."""
        return self.forward + self.backward

    @functools.cached_property
    def hardware(self) -> int:
        """Hardware FLOPs: ``total`` and what is computed again."""
        return self.total + self.recomputed

    def __str__(self) -> str:
        unknown = f"\nnot counted: {_named(self.unknown)}" if self.unknown else ""
        return f"{self.by_module}{unknown}"


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
    counting = _Counting(model)
    with taking_turns, contextlib.ExitStack() as stack:
        stack.callback(RandomState.capture().restore)
        if model is not None:
            inputs, keywords = _detached((inputs, keywords), {})
            stack.enter_context(_untouched(model))
            counting.adopted = lambda module: stack.enter_context(_untouched(module))
        stack.enter_context(_eager())
        with counting:
            result = original(*inputs, **keywords)
            if model is not None and backward:
                _backward(result)
    count = counting.count()
    if count.unknown:
        warnings.warn(
            f"FLOPs of these operators are not known and count 0: {_named(count.unknown)}; "
            "flatout.mfu.register_flops gives them a formula",
            RuntimeWarning,
            stacklevel=2,
        )
    return count


def is_counting() -> bool:
    """Whether ``count_flops`` is what runs the caller."""
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    return torch._C._len_torch_dispatch_stack() > 0 and any(isinstance(mode, _Counting) for mode in stack())


def _named(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{name} (called {n}x)" for name, n in calls.items())


def _readable(flops: int) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops} "


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
    buffers = [(b, b.detach().clone()) for b in module.buffers() if _is_comparable(b)]
    try:
        with _gradients_aside(list(module.parameters())):
            yield
    finally:
        slots.restore()
        for buffer, saved_bits in buffers:
            # Batch norm writes without a new version number; a needless write breaks graphs that hold the buffer.
            if not torch.equal(buffer, saved_bits):
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(saved_bits)


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
def _eager() -> Iterator[None]:
    """Compiled functions and modules run their eager code, and keep what was compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # torch.compile(module) inside another one is seen as a module of its own: nothing is counted twice.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks", UserWarning)
        yield


@dataclass
class _Tally:
    """A module under way: the counts of its own operators."""

    name: str
    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    children: list[_Tally] = field(default_factory=list)

    def node(self) -> FlopNode:
        children = tuple(child.node() for child in self.children)
        return FlopNode(
            self.name,
            self.forward + sum(child.forward for child in children),
            self.backward + sum(child.backward for child in children),
            self.recomputed + sum(child.recomputed for child in children),
            children,
        )


@dataclass(frozen=True)
class _Place:
    """Where an operator runs.

    Attributes:
        tally: the module.
        causal: queries and keys of the causal attention that it is part of, if any.
        task: the backward during which the place was entered; -1 for none.
    """

    tally: _Tally
    causal: tuple[int, int] | None = None
    task: int = -1


class _Lane:
    """What one thread's forward has passed through.

    Autograd numbers its nodes per thread in the order of their creation. The number at each change of place tells in
    which place any node was created, so no hook on a tensor is needed.
    """

    def __init__(self, root: _Place) -> None:
        self.stack = [root]
        self._numbers = [-1]
        self._places = [root]

    def enter(self, place: _Place) -> None:
        self.stack.append(place)
        self._mark()

    def leave(self) -> None:
        self.stack.pop()
        self._mark()

    def place_of(self, number: int) -> _Place:
        return self._places[bisect.bisect_right(self._numbers, number) - 1]

    def _mark(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._places.append(self.stack[-1])


class _Counting(TorchDispatchMode):
    """Sees every operator that runs while it is active, in the backward's threads too."""

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module | None) -> None:
        super().__init__()
        self.adopted: Callable[[nn.Module], object] = lambda module: None
        self._root = _Tally("" if root is None else type(root).__name__)
        self._tallies: dict[nn.Module, _Tally] = {}
        if root is not None:
            self._name(root, self._root)
        self._dense = 0
        self._by_op: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._lanes: dict[int, _Lane] = defaultdict(lambda: _Lane(_Place(self._root)))
        self._recording = self._lanes[threading.get_ident()]
        self._lane_of_task: dict[int, _Lane] = {}
        self._resources = contextlib.ExitStack()
        self._depth = 0

    def count(self) -> FlopCount:
        tree = self._root.node()
        if not self._root.name:  # a callable: the one module that it ran, if it ran one and nothing else
            alone = len(tree.children) == 1 and tree.own == 0 and tree.recomputed == tree.children[0].recomputed
            tree = tree.children[0] if alone else FlopNode("(all)", tree.forward, tree.backward, tree.recomputed,
                                                           tree.children)  # fmt: skip
        return FlopCount(
            forward=tree.forward,
            backward=tree.backward,
            recomputed=tree.recomputed,
            dense=self._dense,
            by_module=tree,
            by_op=dict(self._by_op.most_common()),
            unknown=dict(self._unknown.most_common()),
        )

    def __enter__(self) -> _Counting:
        self._depth += 1
        if self._depth == 1:
            self._resources.callback(register_module_forward_pre_hook(self._enter).remove)
            self._resources.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            self._resources.enter_context(_hearing_of_kernels(self.launched))
            self._resources.enter_context(_marking_causal_attention(self))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self._depth == 0:
            self._resources.close()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        self._note_task()
        if isinstance(op, HigherOrderOperator):
            result = op(*args, **keywords)
            self._record(op.name(), higher_order_cost(op, args))
            return result
        if not torch._C._dispatch_has_kernel(op.name()):
            return NotImplemented  # what a tensor subclass is asked, such as its size: it answers itself
        if _is_composite(op) and not has_formula(op) and not _are_nested(args):
            with self:
                result = op.decompose(*args, **keywords)
            if result is not NotImplemented:
                return result
        result = op(*args, **keywords)
        cost = cost_of(op, args, keywords, result)
        if cost is not None or not is_cheap(op):
            self._record(op.name(), cost)
        return result

    def launched(self, kernel: Any) -> None:
        """A Triton kernel starts: one that Python code starts, unknown to any operator, or an operator's own."""
        if self._is_active():
            self._unknown[f"triton::{kernel.get()['name']}"] += 1

    @contextlib.contextmanager
    def in_causal_attention(self, queries: int, keys: int) -> Iterator[None]:
        """What runs or is recorded inside is causal attention that torch may compute dense."""
        lane = self._lane()
        lane.enter(replace(lane.stack[-1], causal=(queries, keys)))
        try:
            yield
        finally:
            lane.leave()

    def _is_active(self) -> bool:
        """Whether the caller is counted: not what another thread does meanwhile, nor the inside of an operator."""
        return self in _get_current_dispatch_mode_stack()

    def _record(self, name: str, cost: Cost | None) -> None:
        if cost is None:
            self._unknown[name] += 1
            return
        place, phase = self._here()
        if place.causal is not None and cost.needed == cost.dense:
            queries, keys = place.causal
            cost = cost.scaled(causal_pairs(queries, keys), queries * keys)
        tally = place.tally
        setattr(tally, phase, getattr(tally, phase) + cost.needed)
        tally.recomputed += cost.again
        self._by_op[name] += cost.needed + cost.again
        if phase != "recomputed":
            self._dense += cost.dense

    def _here(self) -> tuple[_Place, str]:
        place, task = self._lane().stack[-1], torch._C._current_graph_task_id()
        if task == -1:
            return place, "forward"
        if place.task == task:  # a module's forward inside a backward
            return place, "recomputed"
        again = torch.is_grad_enabled() and _in_checkpoint()
        return self._place_of_node(task), "recomputed" if again else "backward"

    def _place_of_node(self, task: int) -> _Place:
        node: Any = torch._C._current_autograd_node()
        lane = self._lane_of_task[task]
        return lane.stack[0] if node is None else lane.place_of(node._sequence_nr())

    def _lane(self) -> _Lane:
        return self._lanes[threading.get_ident()]

    def _note_task(self) -> None:
        """A backward runs over what the thread that last recorded a forward has made.

        That is another than its own in the nested backward of a reentrant checkpoint on a GPU, whose forward is
        repeated in the engine's thread.
        """
        task = torch._C._current_graph_task_id()
        if task != -1:
            self._lane_of_task.setdefault(task, self._recording)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._is_active():
            return
        self._note_task()
        lane = self._recording = self._lane()
        if module not in self._tallies:
            self._adopt(module, lane.stack[-1].tally)
        lane.enter(_Place(self._tallies[module], lane.stack[-1].causal, torch._C._current_graph_task_id()))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        lane = self._lane()
        if len(lane.stack) > 1 and lane.stack[-1].tally is self._tallies.get(module):
            lane.leave()

    def _adopt(self, module: nn.Module, parent: _Tally) -> None:
        """A module that no known one has registered: it belongs to the one that calls it."""
        self.adopted(module)
        name = type(module).__name__
        same = sum(child.name.partition("#")[0] == name for child in parent.children)
        tally = _Tally(f"{name}#{same + 1}" if same else name)
        parent.children.append(tally)
        self._name(module, tally)

    def _name(self, module: nn.Module, tally: _Tally) -> None:
        self._tallies[module] = tally
        for name, child in module.named_children():
            if child not in self._tallies:
                below = _Tally(name)
                tally.children.append(below)
                self._name(child, below)


@contextlib.contextmanager
def _hearing_of_kernels(launched: Callable[[Any], None]) -> Iterator[None]:
    """Has Triton, where it is in use, tell of the kernels that Python code starts."""
    knobs = sys.modules.get("triton.knobs")
    hooks = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if hooks is None:
        yield
        return
    hooks.add(launched)
    try:
        yield
    finally:
        hooks.remove(launched)


@contextlib.contextmanager
def _marking_causal_attention(counting: _Counting) -> Iterator[None]:
    """Sees causal SDPA before torch turns it into products of whole matrices where no fused kernel takes it.

    The function is replaced for the time, as a ``TorchFunctionMode`` keeps ``nn.TransformerEncoder`` off its fast path.
    One imported by name before is not seen, and counts dense where it is not fused.
    """
    original = nn.functional.scaled_dot_product_attention
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def marked(*args: Any, **keywords: Any) -> Tensor:
        call = {**dict(zip(names, args, strict=False)), **keywords}
        if not call.get("is_causal") or call["query"].is_nested:
            return original(*args, **keywords)
        with counting.in_causal_attention(call["query"].shape[-2], call["key"].shape[-2]):
            return original(*args, **keywords)

    nn.functional.scaled_dot_product_attention = marked
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def _is_composite(op: OpOverload) -> bool:
    """Whether the operator is made of others: seen whole only in inference mode."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _are_nested(args: tuple[Any, ...]) -> bool:
    """Whether these are nested tensors, which have kernels of their own for composite operators."""
    return any(isinstance(arg, Tensor) and arg.is_nested for arg in args)


def _in_checkpoint() -> bool:
    """Whether the caller is repeating a checkpointed forward: a backward that is itself differentiated is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        if frame.f_code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False

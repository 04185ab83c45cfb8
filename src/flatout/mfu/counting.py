"""Dispatch mode that counts the FLOPs of every operator of a forward and its backward."""

from __future__ import annotations

import bisect
import contextlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from flatout.mfu.attention_formulas import causal_pairs
from flatout.mfu.cost import Cost
from flatout.mfu.flop_count import FlopCount, FlopNode
from flatout.mfu.formulas import cost_of, has_formula, higher_order_cost, is_cheap


def is_counting() -> bool:
    """Return True if ``count_flops`` runs the caller."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, Counting) for mode in _get_current_dispatch_mode_stack()
    )


@dataclass
class _Tally:
    """Counts of a module's own operators, without its submodules."""

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
    """Place in the model that an operator belongs to.

    Attributes:
        tally: counts of the module.
        causal: number of queries and keys of the surrounding causal attention, or None.
        task: id of the backward that entered the place, -1 outside any backward.
    """

    tally: _Tally
    causal: tuple[int, int] | None = None
    task: int = -1


class _Lane:
    """Places that one thread's forward has passed.

    Autograd numbers the nodes of each thread in the order of creation. The number at each change of place gives the
    place of every node without hooks on tensors.
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


class Counting(TorchDispatchMode):
    """Dispatch mode that counts every operator, also in the backward's threads."""

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
        """Return the FLOPs so far."""
        tree = self._root.node()
        if not self._root.name:  # for a callable that ran only one module, this module becomes the root
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

    def __enter__(self) -> Counting:
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
            return NotImplemented  # a query of a tensor subclass, such as its size, which the subclass answers
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
        """Record a Triton kernel that Python code launches, as an unknown operator."""
        if self._is_active():
            self._unknown[f"triton::{kernel.get()['name']}"] += 1

    @contextlib.contextmanager
    def in_causal_attention(self, queries: int, keys: int) -> Iterator[None]:
        """Treat the operators of the block as causal attention, which torch may compute dense."""
        lane = self._lane()
        lane.enter(replace(lane.stack[-1], causal=(queries, keys)))
        try:
            yield
        finally:
            lane.leave()

    def _is_active(self) -> bool:
        """Return True if the caller is counted. Other threads and the inside of an operator are not."""
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
        """Assign the running backward to the thread that last recorded a forward.

        The engine's thread that runs the backward may be another one. A reentrant checkpoint on a GPU repeats the
        forward in the engine's thread, and then runs a nested backward.
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
        """Add a module that is no submodule of a known module. Its parent is the module that calls it."""
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
    """Call ``launched`` for each Triton kernel that Python code launches, if Triton is imported."""
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
def _marking_causal_attention(counting: Counting) -> Iterator[None]:
    """Mark calls of causal SDPA, which torch splits into dense products if no fused kernel applies.

    Inside the block, the function is replaced, because a ``TorchFunctionMode`` would disable the fast path of
    ``nn.TransformerEncoder``. A call through an older reference to the function is not marked. If it is not fused, all
    its pairs count.
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
    """Return True if the operator decomposes into others. Only inference mode dispatches such an operator whole."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _are_nested(args: tuple[Any, ...]) -> bool:
    """Return True if a tensor is nested. Composite operators have kernels for nested tensors."""
    return any(isinstance(arg, Tensor) and arg.is_nested for arg in args)


def _in_checkpoint() -> bool:
    """Return True if the caller repeats a checkpointed forward, and not a backward that is differentiated again."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        if frame.f_code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False

"""FLOPs of a model or of any callable, counted by exact formulas from the operators that run."""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from flatout.core import formatting
from flatout.core.batches import batch_size_of, objects_of, tensors_of, tensors_within, tokens_of
from flatout.core.described import Described
from flatout.core.random_state import RandomState
from flatout.core.replaced import replaced
from flatout.core.saved import SavedTensor, saved_slots
from flatout.mfu.cost import Cost, causal_pairs, cost_of, has_formula, higher_order_cost, is_abstract, is_cheap
from flatout.native._host import signature


@dataclass(frozen=True, repr=False)
class FlopNode(Described):
    """FLOPs of one module and its submodules.

    A module that is used several times or has several names is one node, with its first name. Its backward is the
    backward of the operators that ran in its forward.

    Attributes:
        name: the module's name in its parent, or the class name of a root.
        forward: FLOPs of the forward.
        backward: FLOPs of the backward.
        recomputed: recomputed FLOPs, see ``FlopCount``.
        children: the submodules, in order of registration.
    """

    name: str
    forward: int
    backward: int
    recomputed: int
    children: tuple[FlopNode, ...]

    @property
    def total(self) -> int:
        """FLOPs of forward and backward."""
        return self.forward + self.backward

    @property
    def own(self) -> int:
        """``total`` without the submodules."""
        return self.total - sum(child.total for child in self.children)

    def __getitem__(self, path: str) -> FlopNode:
        """Return the submodule with a dotted name, such as ``layer1.0.conv1``.

        Raises:
            KeyError: there is no submodule with this name.
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
        """Return a tree of all modules with FLOPs: total, share of the whole model, forward and backward."""
        rows = list(self._rows(0))
        width = max(len(name) for name, _ in rows)
        whole = max(self.total, 1)
        return "\n".join(
            f"{name:{width}}  {_readable(node.total):>9} {node.total / whole:7.1%}"
            f"  forward {_readable(node.forward):>9}  backward {_readable(node.backward):>9}"
            for name, node in rows
        )

    def _facts(self) -> dict[str, str]:
        return {"name": self.name, **_flops(total=self.total, forward=self.forward, backward=self.backward)}

    def _rows(self, depth: int) -> Iterator[tuple[str, FlopNode]]:
        yield "  " * depth + self.name, self
        for child in self.children:
            if child.total or child.recomputed:
                yield from child._rows(depth + 1)


@dataclass(frozen=True, repr=False)
class FlopCount(Described):
    """FLOPs of one call. A multiply-add counts as 2.

    ``total`` is the work of the model's mathematics, on which MFU is based. ``hardware`` is the work of the device, on
    which HFU is based. Neither includes the pairs of query and key that ``is_causal`` removes.

    Attributes:
        forward: FLOPs of the forward.
        backward: FLOPs of the backward.
        recomputed: FLOPs of repeated work. Activation checkpointing repeats forwards, up to the last tensor that the
            backward needs. Fused attention recomputes scores in its backward.
        dense: ``total`` with all pairs of causal attention, as in published figures (the 12 * L * H * Q * T of PaLM's
            appendix B).
        by_module: forward, backward and recomputed FLOPs by module.
        by_op: ``forward + backward + recomputed`` by operator.
        unknown: number of calls of each operator that may be costly and has no formula. Such an operator counts 0.
            ``register_flops`` gives it a formula.
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
        """Model FLOPs, which are forward and backward without recomputation."""
        return self.forward + self.backward

    @functools.cached_property
    def hardware(self) -> int:
        """Hardware FLOPs, which are ``total`` and recomputation."""
        return self.total + self.recomputed

    def __str__(self) -> str:
        unknown = f"\nnot counted: {named(self.unknown)}" if self.unknown else ""
        return f"{self.by_module}{unknown}"

    def _facts(self) -> dict[str, str]:
        unknown = f"not counted: {named(self.unknown)}" if self.unknown else ""
        return {**_flops(total=self.total, forward=self.forward, backward=self.backward), "unknown": unknown}


def named(calls: Mapping[str, int]) -> str:
    """Return operators and their numbers of calls, in words."""
    return ", ".join(f"{name} (called {n}x)" for name, n in calls.items())


def _flops(**counts: int) -> dict[str, str]:
    """Return numbers of FLOPs in words, by name."""
    return {name: f"{name} {_readable(flops)}FLOPs" for name, flops in counts.items()}


def _readable(flops: int) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops} "


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
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def marking(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def marked(*args: Any, **keywords: Any) -> Tensor:
            call = {**dict(zip(names, args, strict=False)), **keywords}
            if not call.get("is_causal") or call["query"].is_nested:
                return original(*args, **keywords)
            with counting.in_causal_attention(call["query"].shape[-2], call["key"].shape[-2]):
                return original(*args, **keywords)

        return marked

    with replaced(nn.functional, "scaled_dot_product_attention", marking):
        yield


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
    slots = list(saved_slots(module))
    buffers = [SavedTensor(b) for b in module.buffers() if _is_comparable(b)]
    try:
        with _gradients_aside(list(module.parameters())):
            yield
    finally:
        for part in slots:
            part.restore()
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


MOST = 256
"""Largest number of signatures that are counted. Each count takes memory for a tree of all modules."""

SHARE = 0.02
"""Largest share of the time since the first count that later counts may take. Each count runs an eager step."""


class Work(NamedTuple):
    """Work of one step, in the order of ``MfuCounter.step``'s arguments.

    Attributes:
        samples: number of samples, as ``batch_size_of`` counts them.
        tokens: number of tokens, as ``tokens_of`` counts them.
        flops: FLOPs of the step, or None if unknown.
    """

    samples: int
    tokens: int
    flops: FlopCount | None


class CountedWork:
    """Function that returns the samples, tokens and FLOPs of ``(*args, **kwargs)``. ``count`` counts the FLOPs.

    ``count`` is called once per signature, which is the shapes and dtypes of all tensors. Batches may have many
    signatures, for example of unpadded text. Counting then continues during training, up to ``MOST`` signatures. A
    signature that is not counted yet has no FLOPs.
    """

    def __init__(self, count: Callable[..., FlopCount | None]) -> None:
        self._count = count
        self._known: dict[bytes, Work] = {}
        self._spent = 0.0
        self._since = 0.0

    @property
    def counts(self) -> list[FlopCount]:
        """Known counts, in the order in which their signatures first occurred."""
        return [work.flops for work in self._known.values() if work.flops is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Work:
        """Return the work of a call with these arguments."""
        key = signature((args, kwargs), Tensor, tensors_within)
        known = self._known.get(key)
        if known is not None:
            return known
        given = (args, kwargs)
        samples = batch_size_of(given) if tensors_of(given) or objects_of(given) else 0
        work = Work(samples, tokens_of(given), None)
        begun = time.perf_counter()
        if not self._known:
            self._since = begun
        elif len(self._known) == MOST or self._spent > SHARE * (begun - self._since):
            return work
        if not taking_turns.acquire(blocking=False):  # a thread that counts may wait for this thread
            return work
        try:
            work = work._replace(flops=self._count(*args, **kwargs))
        except Exception as error:  # of the user's code, or out of memory. Training continues without the figure
            warnings.warn(
                f"the FLOPs of a step could not be counted, its MFU is not known: {formatting.first_line(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            taking_turns.release()
        self._known[key] = work
        self._spent += time.perf_counter() - begun
        return work

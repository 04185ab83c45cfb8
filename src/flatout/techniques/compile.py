"""Technique 9 of the checklist: torch.compile, in place."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from flatout.core.breaks import Breaks
from flatout.core.torch_state import COLD_COMPILE_SECONDS, compiled_frames, count_as_own
from flatout.guards import FIRST_ORDER, HOST_RANDOM, PYTHON_STATE
from flatout.mfu.counted_calls import is_wrapped
from flatout.techniques.base import NotApplicable, StepTechnique
from flatout.techniques.calls import (
    PLAIN_VALUES,
    CallCandidate,
    RoutedCall,
    Signature,
    comes_compiled,
    signature,
    why_sizes_vary,
)
from flatout.techniques.candidate import Candidate
from flatout.techniques.sdpa_backend import TORCHS_ATTENTION, attention_kernels
from flatout.techniques.second_order import attach, check, check_loss

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

RELEARN_AFTER = 50
"""Number of plain training calls of one kind that justifies a compilation for it."""

MOST_RECOMPILATIONS = 3
"""Limit of unexpected recompilations, after which compiled code is no longer used."""

WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
MODES = ("default", "max-autotune-no-cudagraphs", *WITH_CUDA_GRAPHS)


class CompiledCall(RoutedCall):
    """Routed call of compiled code for known inputs, and of the plain code for all others.

    Without the plain code, a last, smaller batch or an evaluation pass would stop training for a recompilation. This
    takes half a minute on a CPU, for one batch per epoch. While ``learning``, new inputs are compiled and recorded.
    Later, one more kind of call is compiled if training uses it often, for example with another shape or mode than the
    trial.

    Sizes that varied while learning may take any value. With the default ``dynamic=None``, Dynamo compiles only these
    sizes as dynamic, when it sees the second size. ``dynamic=True`` would also make constant sizes dynamic. Marks on
    the batches' tensors would miss tensors that ``compute_loss`` makes.

    Without gradients the compiled code always runs under ``no_grad``, on normal tensors. Otherwise Dynamo compiles
    separately for ``no_grad``, for ``inference_mode``, and for inputs made under ``inference_mode`` (torch 2.14:
    "dispatch key set mismatch"). Under ``no_grad``, one compilation covers all three.

    The keys of torch's disk caches do not contain the enabled attention kernels (2.14). So code compiled with flash
    attention would also run while flash attention is disabled. Kernels other than torch's defaults therefore become
    part of the key.

    Args:
        plain: the plain call, for unknown inputs.
        compiled: the compiled call.
        modules: modules whose train or eval modes are part of the key.
        reuses_outputs: True if the next call overwrites its outputs, so that copies are returned.
        breaks: receives the report if a gradient is differentiated again. None if this cannot happen: flatout runs the
            backward, or there is none.
    """

    title = "torch.compile"

    def __init__(
        self,
        plain: Callable[..., Any],
        compiled: Callable[..., Any],
        modules: Sequence[nn.Module],
        *,
        reuses_outputs: bool = False,
        breaks: Breaks | None = None,
    ) -> None:
        super().__init__(plain)
        self._breaks = breaks
        self._hooks: Hooks | None = None
        self._compiled: Callable[..., Any] | None = compiled
        self._modules = modules
        self._reuses_outputs = reuses_outputs
        self._known: dict[Hashable, _Shapes] = {}
        self._plain: Counter[Hashable] | None = Counter()
        self._serves_inference = False
        self._expected = 0
        self._recompilations = 0

    def _way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        if self.learning:
            self._hooks = None
        elif self._hooks is not None and self._hooks.differ():
            return None
        call = signature(args, kwargs)
        call = call._replace(kind=(tuple([m.training for m in self._modules]), call.kind))
        if self.learning:
            self._learn(call)
        known = self._known.get(call.kind)
        if known is not None and known.serve(call.shapes):
            return lambda: self._run(args, kwargs)
        self._note_plain(call)
        return None

    def _learn(self, call: Signature) -> None:
        self._known.setdefault(call.kind, _Shapes()).add(call.shapes)
        self._serves_inference |= not torch.is_grad_enabled()

    def _note_plain(self, call: Signature) -> None:
        """Count plain calls, and learn one kind of call that training uses often, from its next call on."""
        if self._plain is None or not (torch.is_grad_enabled() or self._serves_inference):
            return
        if self._breaks is not None and call.has_graph:
            return  # inputs that require gradients are often differentiated twice
        self._plain[call.kind] += 1
        if self._plain[call.kind] == RELEARN_AFTER:
            self._learn(call)
            self._plain = None
            self._expected = 1

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, kernels = compiled_frames(), attention_kernels()
        with contextlib.ExitStack() as stack:
            if self.learning or self._expected:
                # Otherwise a backward is compiled when it first runs, where a failure cannot be caught.
                stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
            if kernels != TORCHS_ATTENTION:
                stack.enter_context(_cached_for(kernels))
            try:
                output = self._call(args, kwargs)
            finally:
                compiled = compiled_frames() - before
                count_as_own(compiled)
        if compiled or self._hooks is None:
            self._hooks = Hooks(self._modules)
        if self._breaks is not None and torch.is_grad_enabled():
            attach(output, self._plainly, self._modules, args, kwargs, self._differentiate_again)
            if compiled:
                check(output, args, kwargs)
        elif compiled:
            check_loss(output)
        if compiled and not self.learning:
            if self._expected:
                self._expected -= 1
            else:
                self._recompilations += 1
                if self._recompilations == MOST_RECOMPILATIONS:
                    self._give_up(
                        f"it was compiled {MOST_RECOMPILATIONS} times more since its trial, {_latest_cause()}"
                    )
        return output

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._breaks is None or DistributedDataParallel._active_ddp_module is None:
            return self._call_compiled(args, kwargs)
        # Otherwise Dynamo makes a part for each of DDP's buckets, and `check` needs a single part.
        ddp, DistributedDataParallel._active_ddp_module = DistributedDataParallel._active_ddp_module, None
        try:
            return self._call_compiled(args, kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = ddp

    def _call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._compiled is not None
        if torch.is_grad_enabled():
            output = self._compiled(*args, **kwargs)
        else:
            with torch.inference_mode(False), torch.no_grad():
                args, kwargs = pytree.tree_map_only(Tensor, _ordinary, (args, kwargs))
                output = self._compiled(*args, **kwargs)
        return pytree.tree_map_only(Tensor, torch.clone, output) if self._reuses_outputs else output

    def _differentiate_again(self) -> None:
        """Use the plain call from now on, because a gradient was differentiated again."""
        assert self._breaks is not None
        self.failure = FIRST_ORDER.reason("a backward with create_graph=True has begun")
        self._end()
        if not self.learning:
            FIRST_ORDER.broken(self._breaks, Compile.name, "a backward with create_graph=True has begun")

    def _give_up(self, reason: str) -> None:
        self._end()
        super()._give_up(reason)

    def _end(self) -> None:
        self._compiled = None
        self._known.clear()


class Hooks:
    """Hooks of modules at the time of a compilation, which compiled code contains. Later hooks would never run.

    Args:
        modules: the compiled modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        here = nn.modules.module
        tables = [here._global_forward_hooks, here._global_forward_pre_hooks]
        tables += [here._global_backward_hooks, here._global_backward_pre_hooks]
        for module in (part for root in modules for part in root.modules()):
            tables += [module._forward_hooks, module._forward_pre_hooks]
            tables += [module._backward_hooks, module._backward_pre_hooks]
        self._tables = [(table, list(table.values())) for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._registered = RemovableHandle.next_id
        self._are_added = False

    def differ(self) -> bool:
        """Return True while a hook was added or removed. torch counts registrations, so that this takes 1 us."""
        if self._are_added or self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            self._are_added = any(self._empty)
        return self._are_added or any(list(table.values()) != hooks for table, hooks in self._tables)


class _Inductor(torch._TorchCompileInductorWrapper):
    """Inductor whose backward keeps the tensors of the forward, so that a graph may be retained."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode, None, None)
        self.mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._functorch.config.patch(donated_buffer=False):
            return super().__call__(*args, **kwargs)


class _Shapes:
    """Shapes for which one kind of call was compiled. Some sizes may take any value."""

    def __init__(self) -> None:
        self._seen: set[tuple[tuple[int, ...], ...]] = set()

    def add(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        self._seen.add(shapes)

    def serve(self, shapes: tuple[tuple[int, ...], ...]) -> bool:
        """Return True if the compiled code serves these shapes.

        Code with a variable size serves all sizes except 0 and 1, for which torch compiles extra code.
        """
        if shapes in self._seen:
            return True
        if len(self._seen) < 2:
            return False
        for tensor, seen in zip(shapes, zip(*self._seen, strict=True), strict=True):
            for size, sizes in zip(tensor, zip(*seen, strict=True), strict=True):
                if size not in sizes and (size < 2 or len(set(sizes)) < 2):
                    return False
        return True


@contextlib.contextmanager
def _cached_for(kernels: object) -> Iterator[None]:
    """Cache code compiled inside the block only for these attention kernels."""
    config = torch.compiler.config
    tag = config.cache_key_tag
    config.cache_key_tag = f"{tag} attention {kernels}"  # config.patch takes three times as long
    try:
        yield
    finally:
        config.cache_key_tag = tag


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a normal tensor over the same memory, without the mark of ``inference_mode``."""
    if not tensor.is_inference():
        return tensor
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _latest_cause() -> str:
    """Return the last guard that failed, from Dynamo's own records."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    reason = (metrics[-1].recompile_reason or "") if metrics else ""
    lines = reason.split("#")[0].splitlines()
    guard = lines[0].partition(": ")[2].strip() if lines else ""
    return f"lastly because this no longer held: {guard}" if guard else "for a reason that Dynamo does not tell"


def _model_entry(module: nn.Module) -> Callable[..., Any]:
    """Return a function for the module's plain call, to be compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return _with_code_of_its_own(call)


def _loss_entry(job: Job) -> Callable[..., Any]:
    """Return a function for ``Objective.loss`` on the trial's kind of batches, to be compiled.

    The function does not refer to the job, whose other attributes would become guards. It is a single function, because
    after a graph break Dynamo compiles each active function separately, and ``Objective.loss`` is shared by all jobs.
    """
    model, loss_fn, compute_loss = job.spec.model, job.spec.loss_fn, job.spec.compute_loss

    def call(batch: Any) -> Any:
        if compute_loss is not None:
            return compute_loss(model, batch)
        x, y = batch
        return loss_fn(model(x), y)  # type: ignore[misc]

    return _with_code_of_its_own(call)


def _with_code_of_its_own(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with its own code object.

    Dynamo counts recompilations by code object, and all functions from one definition share one code object. Without a
    copy, the ninth model in a process, for example in a notebook, would silently run eager. Compiled code and the code
    object refer to each other, partly in C, where Python's garbage collector does not see it. So the compiled code is
    removed when the function dies.
    """
    code = call.__code__.replace()
    made = types.FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    weakref.finalize(made, torch._dynamo.reset_code, code).atexit = False
    return made


class CompiledModel(CallCandidate):
    """Model compiled in one of torch's modes."""

    def __init__(self, model: nn.Module, mode: str = "default", breaks: Breaks | None = None) -> None:
        self.label = self.value = mode
        how: dict[str, Any] = {"mode": mode} if breaks is None else {"backend": _Inductor(mode)}
        compiled = torch.compile(_model_entry(model), **how)
        reuses = mode in WITH_CUDA_GRAPHS
        super().__init__(model, CompiledCall(model._call_impl, compiled, [model], reuses_outputs=reuses, breaks=breaks))


class CompiledLoss(CallCandidate):
    """Model and loss compiled as one, for the steps of a job."""

    def __init__(self, job: Job, mode: str = "default") -> None:
        self.label = self.value = mode
        compiled = torch.compile(_loss_entry(job), mode=mode)
        reuses_outputs = mode in WITH_CUDA_GRAPHS
        call = CompiledCall(job.objective.loss, compiled, job.spec.modules, reuses_outputs=reuses_outputs)
        super().__init__(job.objective, call, "compiled")


class Compile(StepTechnique):
    """Compiles the model to a few large kernels, without changes to its ``state_dict`` keys and pickles.

    For ``run.step``, model and loss are compiled as one. So the softmax of the loss, casts to float32 and the start of
    the backward fuse with the last layer. The model itself is not changed, so it runs plain in ``run.evaluate`` and in
    the user's own calls. The model itself is compiled for the user's own loop, for inference, and for a loss that is
    the model's own ``.loss``. This also applies to batches with values that are no tensors and change, because compiled
    code would fit only one of them.

    When it helps: many small elementwise operators that fuse, and launch-bound GPU steps. The mode ``reduce-overhead``
    helps launch-bound steps most, because it replays the model as CUDA graphs. When it hurts: the first step takes half
    a minute, and models of a few large matrix products gain little. The report shows the number of steps after which
    the compilation has paid. Inputs without compiled code run eager, and so does everything after a failure or too many
    recompilations.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html. "30% to 2x" is from torch's documentation
    of 2.0, for training and inference (pytorch #93794). CUDA graphs with accumulation: #169545.
    """

    name = "compile"
    number = 9
    title = "torch.compile"
    rationale = "PyTorch has made a few large kernels of the model's many operators, which move less memory"
    expected = "30 % to 2×"
    effect = "reseeded"
    assumes = (HOST_RANDOM, PYTHON_STATE, FIRST_ORDER)
    values = f"True, {', '.join(map(repr, MODES))}"
    optimistic_gain = 1.5

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds of a cold compilation of a small model on two cores."""
        return COLD_COMPILE_SECONDS

    def check(self, job: Job) -> None:
        """Require a module that is not compiled or scripted yet, and a machine that supports ``torch.compile``."""
        reason = comes_compiled(job.spec.model) or why_no_compiler(job.spec.device) or why_sizes_vary(job)
        if reason:
            raise NotApplicable(reason)

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the default mode, and CUDA graphs if possible.

        ``max-autotune`` takes minutes, so it requires a request.
        """
        modes = ["default"] if _why_no_cuda_graphs(job) else ["default", "reduce-overhead"]
        return [_candidate(job, mode) for mode in modes]

    def accepts(self, value: Any) -> bool:
        """Accept True or a mode."""
        return value is True or (isinstance(value, str) and value in MODES)

    def check_value(self, job: Job, value: Any) -> None:
        """Reject a mode that this job cannot use."""
        super().check_value(job, value)
        if value in WITH_CUDA_GRAPHS and job.spec.device.type == "cuda" and _why_no_cuda_graphs(job):
            raise ValueError(f"techniques['compile']={value!r} cannot serve here: {_why_no_cuda_graphs(job)}")
        if value == "reduce-overhead" and job.spec.device.type != "cuda":
            raise ValueError("techniques['compile']='reduce-overhead' replays CUDA graphs: it needs a GPU")

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a mode."""
        return _candidate(job, "default" if value is True else value)

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if the user has compiled the model and ``value`` is True, which leaves the mode open."""
        by_user = (
            isinstance(job.spec.model, torch._dynamo.OptimizedModule) or job.spec.model._compiled_call_impl is not None
        )
        return value is True and by_user


def _candidate(job: Job, mode: str) -> Candidate:
    if _compiles_loss(job):
        return CompiledLoss(job, mode)
    return CompiledModel(job.spec.model, mode, None if job.spec.inference or mode in WITH_CUDA_GRAPHS else job.breaks)


def _compiles_loss(job: Job) -> bool:
    """Return True if model and loss can be compiled as one call.

    The batches must have one signature, and no wrapper may listen to the model.
    """
    if job.why_no_step or (job.spec.loss_fn is None and job.spec.compute_loss is None) or is_wrapped(job.spec.model):
        return False
    leaves = pytree.tree_leaves(list(job.data.batches))
    kinds = {signature((batch,), {}).kind for batch in job.data.batches}
    return len(kinds) <= 1 and all(isinstance(leaf, (Tensor, *PLAIN_VALUES)) for leaf in leaves)


def _why_no_cuda_graphs(job: Job) -> str:
    """Return the reason why compiled code cannot be replayed as CUDA graphs; empty if it can."""
    if job.spec.device.type != "cuda":
        return "there is no CUDA device"
    if job.spec.accumulate > 1:
        return "the graph of a backward writes over the gradients that accumulate"
    if job.why_no_step and not job.spec.inference:
        return "in a loop of one's own a second forward may come before the first one's backward"
    return ""


def why_no_compiler(device: torch.device) -> str:
    """Return the requirement of ``torch.compile`` that this machine lacks; empty if it has all."""
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off in this process: TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE is set"
    try:
        torch._dynamo.eval_frame.check_if_dynamo_supported()
    except RuntimeError as error:
        return f"torch.compile does not work here: {error}"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "torch.compile writes GPU kernels with Triton, and the package triton is not installed"
        if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
            return "torch.compile needs a C compiler, and there is none: install gcc or clang"
        return ""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    wanted = os.environ.get("CXX", "cl" if sys.platform == "win32" else usual)
    if shutil.which(wanted.split()[0] if wanted.split() else "") is None:
        return f"torch.compile needs a C++ compiler, and there is no {wanted!r} here: install one, or name it in CXX"
    return ""

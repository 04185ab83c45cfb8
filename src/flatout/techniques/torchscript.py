"""Technique 11 of the checklist: TorchScript, on request."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.core import formatting
from flatout.core.batches import tensors_of
from flatout.core.instance_class import as_written
from flatout.core.random_state import RandomState
from flatout.core.snapshot import Snapshot
from flatout.guards import HOST_RANDOM, PYTHON_STATE
from flatout.techniques.base import NotApplicable, NothingBetter, StepTechnique
from flatout.techniques.calls import CallCandidate, RoutedCall, comes_compiled, routed_calls, signature, why_sizes_vary
from flatout.techniques.compile import CompiledCall
from flatout.training.autocast import call_as
from flatout.training.tolerance import ALLOWED, apart, compute_dtype, floats_of

if TYPE_CHECKING:
    from flatout.techniques.candidate import Candidate
    from flatout.training.job import Job

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keywords of a call."""

Form = Callable[..., Any]

RUNS = 3
"""Calls of a form before its outputs are compared, because TorchScript rewrites its graph after the first calls."""


def script(module: nn.Module, inputs: Inputs) -> Form:
    """Return the scripted module in its present modes."""
    with as_written(module):
        return torch.jit.script(module)


def trace(module: nn.Module, inputs: Inputs) -> Form:
    """Return a trace of the module in its present modes.

    Raises:
        NotApplicable: the tracer warns that the trace would be wrong for other inputs.
    """
    args, kwargs = inputs
    if args and kwargs:
        raise NotApplicable("a trace takes positional arguments or keywords, not both")
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.jit.TracerWarning.ignore_lib_warnings()  # torch's own code warns about its checks of sizes
        stack.enter_context(as_written(module))
        for device in {t.device.type for t in tensors_of(inputs)}:  # no 16-bit weights as constants of the trace
            stack.enter_context(torch.autocast(device, enabled=False))
        form = torch.jit.trace(
            module, args or None, example_kwarg_inputs=kwargs or None, check_trace=False, strict=False
        )
    for warning in said:
        if issubclass(warning.category, torch.jit.TracerWarning):
            place = f"{os.path.basename(warning.filename)}:{warning.lineno}"
            raise NotApplicable(f"it would not hold for other inputs: {place}: {str(warning.message).split('. ')[0]}")
    return form


FORMS: dict[str, Callable[[nn.Module, Inputs], Form]] = {"script": script, "trace": trace}


class ScriptedCall(RoutedCall):
    """Routed call of a scripted or traced module for verified inputs and modes, and of the plain module for others.

    While ``learning``, the first call of a kind scripts the module, or traces it if scripting fails, in the present
    modes and in eval mode. Each form is compared with the plain module. The plain call is used while the module differs
    from the scripted one in an attribute, parameter, submodule or hook.

    Args:
        module: the module whose call is replaced.
        names: keys of ``FORMS`` to try, in this order.
    """

    title = "TorchScript"

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__(module._call_impl)
        self.names = names
        self._module = module
        self._modules = list(module.modules())
        self._forms: dict[Any, Form] = {}
        self._taken: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def _way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        kind = signature(args, kwargs).kind
        if self.learning and (kind, self._modes()) not in self._forms:
            self._learn(kind, (args, kwargs))
        form = self._forms.get((kind, self._modes()))
        return partial(call_as, self._module, form, *args, **kwargs) if form and self._is_as_taken() else None

    def _modes(self) -> tuple[bool, ...]:
        return tuple([m.training for m in self._modules])

    def _is_as_taken(self) -> bool:
        """Return True if all attributes are those of the scripted module. Modes may differ: each has its own form."""
        for now, then in self._taken:
            then["training"] = now["training"]
        try:
            return all(now == then for now, then in self._taken) and not nn.modules.module._has_any_global_hook()
        except Exception:  # tensors and arrays raise, and are compared only if one was replaced
            return False

    def _learn(self, kind: Any, inputs: Inputs) -> None:
        """Find a form that computes the same as the plain module.

        Raises:
            NothingBetter: no form computes the same.
        """
        forward = any(m._forward_hooks or m._forward_pre_hooks for m in self._modules)
        if forward or any(m._backward_hooks or m._backward_pre_hooks for m in self._modules):
            raise NothingBetter("the model has hooks, which TorchScript does not call")
        copied = [{k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for m in self._modules]
        self._taken = list(zip(map(vars, self._modules), copied, strict=True))
        reasons = []
        for name in self.names:
            state = Snapshot.capture([self._module])
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # the deprecation, which the row mentions
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self._forms[kind, self._modes()] = verified(self._module, name, inputs)
                    if any(self._modes()):
                        self._module.eval()
                        self._forms[kind, self._modes()] = verified(self._module, name, inputs)
            except Exception as error:
                reasons.append(f"{name}: {error if isinstance(error, NotApplicable) else formatting.first_line(error)}")
            else:
                self.names = [name]
                return
            finally:
                state.restore()
        self._forms.clear()
        raise NothingBetter("; ".join(reasons))


def verified(module: nn.Module, name: str, inputs: Inputs) -> Form:
    """Return a form of the module in its present modes, after a comparison with the plain module.

    The comparison uses inputs that reach other branches of a model: original, negated, shuffled and resized.

    Raises:
        NotApplicable: outputs, or gradients of the parameters, differ.
    """
    form, allowed = FORMS[name](module, inputs), ALLOWED[compute_dtype(module)]
    samples = next((t.size(0) for t in tensors_of(inputs) if t.dim()), 0)

    def shuffled(t: Tensor) -> Tensor:
        return t.flatten()[torch.randperm(t.numel(), generator=torch.Generator().manual_seed(0))].view(t.shape)

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "as they come": lambda t: t,
        "negated": lambda t: -t if t.is_floating_point() or t.is_complex() else t,
        "shuffled": shuffled,
        "resized": lambda t: t[: (samples + 1) // 2] if t.dim() and t.size(0) == samples else t,
    }
    for way, alter in ways.items():
        changed: Any = pytree.tree_map_only(Tensor, alter, inputs)
        where = f"for inputs {way}" if module.training else f"in eval mode for inputs {way}"
        numbers = RandomState.capture(None)
        try:
            plain = _results(module, module._call_impl, changed)
        except Exception:
            if way == "as they come":
                raise
            continue  # the model does not take such inputs
        for _ in range(RUNS):
            numbers.restore()
            found = _results(module, partial(call_as, module, form), changed)
        for i, (what, most) in enumerate({"outputs": allowed.outputs, "gradients": allowed.gradients}.items()):
            by, _ = apart(plain[i], found[i])
            if by > most:  # both may draw other random numbers
                most = max(most, 2 * apart(plain[i], _results(module, module._call_impl, changed)[i])[0])
            if by > most:
                raise NotApplicable(f"{what} differ by {by:.2%} {where}, {most:.2%} is allowed")
    return form


def _results(module: nn.Module, call: Form, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the floats in the output of a call, and the gradients of the parameters, by name."""
    output = call(*inputs[0], **inputs[1])
    floats, structure = floats_of(output), pytree.tree_structure(output)
    ends = [t.abs().square().sum() for t in floats if t.requires_grad]
    wanted = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(ends, list(wanted.values()), allow_unused=True) if ends and wanted else ()
    return (
        {f"{structure} {i}": t.detach().clone() for i, t in enumerate(floats)},
        {name: gradient for name, gradient in zip(wanted, gradients, strict=False) if gradient is not None},
    )


class TorchScriptCandidate(CallCandidate):
    """Candidate that replaces the model's call by TorchScript. The first call decides the form."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, ScriptedCall(model, names))

    @property
    def label(self) -> str:  # type: ignore[override]
        """Name in the report: the form, or all possible ones before the first call."""
        return " or ".join(self.call.names) if isinstance(self.call, ScriptedCall) else ""

    value = label


class TorchScript(StepTechnique):
    """Runs the model's forward without Python, as TorchScript: scripted, or traced where it cannot be scripted.

    TorchScript is deprecated upstream since torch 2.11, in favor of ``torch.compile`` and ``torch.export``. No trial
    tries it. ``techniques={"torchscript": True}`` forces it and forbids ``torch.compile``.

    When it helps: models of many small operators, whose time is mostly Python. When it hurts: large operators gain
    nothing. A script ignores later changes by Python, and a trace holds one side of every branch. So each form is
    compared with the plain model before use, by outputs and gradients. The inputs are original, negated, shuffled and
    resized, in train and in eval mode. A ``TracerWarning`` rejects a trace. The model runs plain while an attribute,
    parameter or submodule is replaced, or a hook is registered.

    Sources: https://docs.pytorch.org/docs/stable/jit.html (the deprecation), pytorch #127283 (its first torch version),
    and https://docs.pytorch.org/docs/stable/generated/torch.jit.trace.html (the limits of traces). No gain for training
    is published there.
    """

    name = "torchscript"
    number = 11
    title = "TorchScript (deprecated)"
    expected = "5–15 %"
    rationale = (
        "the model's forward runs without Python between its operators; TorchScript is deprecated upstream since "
        "torch 2.11, so a later torch may no longer have it"
    )
    on_request = (
        "it is deprecated since torch 2.11, and superseded by torch.compile. "
        "Force it with techniques={'torchscript': True}"
    )
    effect = "reseeded"
    assumes = (HOST_RANDOM, PYTHON_STATE)
    values = "True, 'script', 'trace'"
    checks_evaluation = True

    def check(self, job: Job) -> None:
        """Require a module that is not compiled yet, and ``run.step`` or inference, whose calls ``optimize`` knows."""
        reason = comes_compiled(job.spec.model) or why_sizes_vary(job)
        if reason:
            raise NotApplicable(reason)
        if any(isinstance(call, CompiledCall) for call in routed_calls(job)):
            raise NotApplicable("torch.compile runs the model already, and does what TorchScript did")
        if job.why_no_step and not job.spec.inference:
            raise NotApplicable(f"{job.why_no_step}: TorchScript serves run.step alone")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the candidate that leaves the form open."""
        return [self.candidate_of(job, True)]

    def accepts(self, value: Any) -> bool:
        """Accept True, ``"script"`` or ``"trace"``."""
        return value is True or (isinstance(value, str) and value in FORMS)

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a form; True leaves the form open."""
        return TorchScriptCandidate(job.spec.model, [*FORMS] if value is True else [value])

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if the model is already scripted or traced and ``value`` is True, which leaves the form open."""
        return value is True and isinstance(job.spec.model, torch.jit.ScriptModule)

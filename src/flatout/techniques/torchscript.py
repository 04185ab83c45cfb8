"""Technique 11 of the checklist: TorchScript, a fallback without torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.core import formatting
from flatout.core.batches import tensors_of
from flatout.core.random_state import RandomState
from flatout.core.snapshot import Snapshot
from flatout.guards import HostRandom, PythonState
from flatout.techniques.base import NotApplicable, NothingBetter, StepTechnique
from flatout.techniques.calls import CallCandidate, RoutedCall, comes_compiled, routed_calls, signature, why_sizes_vary
from flatout.techniques.candidate import Candidate
from flatout.techniques.compile import CompiledCall, why_no_compiler
from flatout.techniques.torchscript_forms import FORMS, ScriptForm, TakenOver, TraceForm
from flatout.training.autocast import call_as
from flatout.training.tolerance import ALLOWED, apart, compute_dtype, floats_of

if TYPE_CHECKING:
    from flatout.report.model import Pace
    from flatout.training.job import Job

KINDS = ("script", "trace")

RUNS = 3
"""Calls of a form before its outputs are compared.

TorchScript profiles the first calls and rewrites its graph after them.
"""


class ScriptedCall(RoutedCall):
    """Routed call of a scripted or traced module for verified kinds of input, and of the plain module for others.

    While ``learning``, the first call of a kind scripts the module, or traces it if scripting fails. The outputs and
    the gradients of the parameters are then compared with the plain module's. The comparison uses the original,
    negated, shuffled and resized inputs, in the present modes and in eval mode. The plain call is used while hooks are
    registered. After an attribute, parameter or submodule is replaced, the plain call is used permanently, because a
    script does not see the change.

    Args:
        module: the module whose call is replaced.
        kinds: forms of ``KINDS`` to try, in this order.
    """

    title = "TorchScript"

    def __init__(self, module: nn.Module, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(module._call_impl)
        self.form = ""
        self._module = module
        self._kinds = kinds
        self._known: dict[Any, ScriptForm | TraceForm] = {}
        self._taken: TakenOver | None = None

    def _way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        kind = signature(args, kwargs).kind
        if self.learning and kind not in self._known:
            self._learn(kind, args, kwargs)
        form = self._known.get(kind)
        if form is None or self._taken is None or self._taken.hooked:
            return None
        changed = self._taken.changed()
        if changed:
            self._give_up(changed)
            return None
        way = form.way()
        return None if way is None else lambda: call_as(self._module, way, *args, **kwargs)

    def _learn(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find a form that computes the same as the plain module.

        Raises:
            NothingBetter: no form computes the same.
        """
        reasons = []
        for name in [self.form] if self.form else self._kinds:
            try:
                self._known[kind] = self._verified(name, args, kwargs)
                self.form = name
                return
            except Exception as error:
                reasons.append(f"{name}: {error if isinstance(error, _Refused) else formatting.first_line(error)}")
        raise NothingBetter("; ".join(reasons))

    def _verified(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ScriptForm | TraceForm:
        module, state = self._module, Snapshot.capture([self._module])
        taken = TakenOver(module)
        if taken.hooked:
            raise _Refused("the model has hooks, which TorchScript does not call")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the deprecation, which the row mentions
                warnings.simplefilter("ignore", DeprecationWarning)
                form = FORMS[name](module)
                for mode in dict.fromkeys((module.training, False)):
                    if mode != module.training:
                        module.eval()
                    form.prepare(args, kwargs)
                    self._compare(form, args, kwargs)
        finally:
            state.restore()
        if taken.changed():
            raise _Refused(f"the forward keeps something in Python, which TorchScript would not: {taken.changed()}")
        self._taken = taken
        return form

    def _compare(self, form: ScriptForm | TraceForm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the plain module and the form, in the module's present modes."""
        module, way = self._module, form.way()
        assert way is not None
        allowed = ALLOWED[compute_dtype(module)]
        for name, inputs, named in _altered(args, kwargs):
            numbers = RandomState.capture(None)
            try:
                plain = self._results(module._call_impl, inputs, named)
            except Exception:
                if name == AS_THEY_COME:
                    raise
                continue  # the model does not take such inputs
            for _ in range(RUNS):
                numbers.restore()
                other = self._results(lambda *a, **k: call_as(module, way, *a, **k), inputs, named)
            where = f"for inputs {name}" if module.training else f"in eval mode for inputs {name}"
            if plain.kind != other.kind:
                raise _Refused(f"it returns {other.kind}, not {plain.kind}, {where}")
            for what, most in (("outputs", allowed.outputs), ("gradients", allowed.gradients)):
                by, _ = apart(getattr(plain, what), getattr(other, what))
                if not by <= most:  # both may draw other random numbers
                    redrawn = self._results(module._call_impl, inputs, named)
                    most = max(most, 2 * apart(getattr(plain, what), getattr(redrawn, what))[0])
                if not by <= most:
                    raise _Refused(f"{what} differ by {by:.2%} {where}, {most:.2%} is allowed")

    def _results(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Results:
        output = call(*args, **kwargs)
        floats = floats_of(output)
        ends = [t.abs().square().sum() for t in floats if t.requires_grad]
        wanted = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(ends, list(wanted.values()), allow_unused=True) if ends and wanted else ()
        named = zip(wanted, gradients, strict=False)
        return _Results(
            str(pytree.tree_structure(output)),
            {str(i): t.detach().clone() for i, t in enumerate(floats)},
            {name: gradient for name, gradient in named if gradient is not None},
        )


class _Results(NamedTuple):
    """Results of one call, with ``kind`` for the structure of its output."""

    kind: str
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


class _Refused(Exception):
    """Reason why a form cannot replace the module. The message is one clause for the report."""


AS_THEY_COME = "as they come"


def _altered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield inputs that reach other branches of a model: original, negated, shuffled and resized."""
    tensors = tensors_of((args, kwargs))
    samples = next((t.size(0) for t in tensors if t.dim()), 0)

    def negated(t: Tensor) -> Tensor:
        return -t if t.is_floating_point() or t.is_complex() else t

    def shuffled(t: Tensor) -> Tensor:
        order = torch.randperm(t.numel(), generator=torch.Generator().manual_seed(0)).to(t.device)
        return t.flatten()[order].view(t.shape)

    def resized(t: Tensor) -> Tensor:
        if not t.dim() or t.size(0) != samples:
            return t
        return t[: (samples + 1) // 2].clone() if samples > 1 else torch.cat([t, t])

    ways = {AS_THEY_COME: lambda t: t, "negated": negated, "shuffled": shuffled, "resized": resized}
    for name, alter in ways.items():
        altered: Any = pytree.tree_map_only(Tensor, alter, (args, kwargs))
        yield name, *altered


class TorchScriptCandidate(CallCandidate):
    """Candidate that replaces the model's call by TorchScript. The first call decides the form."""

    def __init__(self, model: nn.Module, kinds: Sequence[str] = KINDS) -> None:
        self._kinds = kinds
        super().__init__(model, ScriptedCall(model, kinds))

    @property
    def form(self) -> str:
        """Form of the model's call; empty before the first call."""
        return self.call.form if isinstance(self.call, ScriptedCall) else ""

    @property
    def label(self) -> str:  # type: ignore[override]
        """Name in the report: the form, or all possible ones."""
        return self.form or " or ".join(self._kinds)

    @property
    def value(self) -> str | bool:
        """Value in a plan: the form, or True before the first call."""
        return self.form or True


class TorchScript(StepTechnique):
    """Runs the model's forward without Python, as TorchScript: scripted, or traced where it cannot be scripted.

    TorchScript is deprecated upstream since torch 2.11, in favor of ``torch.compile`` and ``torch.export``. It is tried
    if ``torch.compile`` is not available: without a compiler on the machine, or after all its trials failed.
    ``techniques={"torchscript": True}`` forces it and forbids ``torch.compile``.

    When it helps: models of many small operators, whose time is mostly Python. When it hurts: large operators gain
    nothing. A script ignores later changes by Python, and a trace holds one side of every branch. So each form is
    compared with the plain model before use, by outputs and gradients. The inputs are original, negated, shuffled and
    resized, in train and in eval mode. A ``TracerWarning`` rejects a trace. The model runs plain again after an
    attribute, parameter or submodule is replaced, or a hook is registered.

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
    effect = "reseeded"
    assumes = (HostRandom(), PythonState())
    values = "True, 'script', 'trace'"
    checks_evaluation = True
    optimistic_gain = 1.5

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Return the seconds to script, trace and compare small models."""
        return 2.0

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
        """Return the one candidate, if ``torch.compile`` is not available."""
        if not why_no_compiler(job.spec.device) and "compile" not in job.failed:
            raise NotApplicable(
                "it is deprecated since torch 2.11, and superseded by torch.compile, which works here. "
                "Force it with techniques={'torchscript': True}"
            )
        return [TorchScriptCandidate(job.spec.model)]

    def accepts(self, value: Any) -> bool:
        """Accept True, ``"script"`` or ``"trace"``."""
        return value is True or (isinstance(value, str) and value in KINDS)

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a form; True leaves the form open."""
        return TorchScriptCandidate(job.spec.model, KINDS if value is True else (value,))

    def is_so(self, job: Job, value: Any) -> bool:
        """Return True if the model is already scripted or traced and ``value`` is True, which leaves the kind open."""
        return value is True and isinstance(job.spec.model, torch.jit.ScriptModule)

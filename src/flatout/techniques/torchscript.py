"""11: TorchScript, where torch.compile is not to be had."""

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
from flatout.techniques.base import NotApplicable, NothingBetter, StepTechnique
from flatout.techniques.calls import CallCandidate, RoutedCall, comes_compiled, routed_calls, signature
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
"""Calls of a form before its outputs count: TorchScript watches the first ones and rewrites its graph after them."""


class ScriptedCall(RoutedCall):
    """Calls the scripted or traced module for the kinds of input that it was verified with, others plainly.

    The first call of a kind, while ``learning``, scripts the module, or traces it where that fails, and compares the
    outcome with the plain module's: outputs on the inputs as they come, negated, shuffled and resized, in the present
    modes and in eval mode, and the gradients of the parameters. The plain call also serves while somebody listens on
    a hook, and for good once an attribute, parameter or submodule is replaced: a script does not see that.

    Args:
        module: whose call it is.
        kinds: what to try, of ``KINDS``, in this order.
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
        """Find a form that does what the plain module does.

        Raises:
            NothingBetter: there is none.
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
                warnings.simplefilter("ignore", FutureWarning)  # that it is deprecated, which the row says
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
        """Plain and other form side by side, in the module's present modes."""
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
                if not by <= most:  # unless its numbers are other draws
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
    """What one call gave; ``kind`` is the structure of its output."""

    kind: str
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


class _Refused(Exception):
    """Why a form cannot stand for the module: one clause for the report."""


AS_THEY_COME = "as they come"


def _altered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Inputs that take a model's other branches: as they come, negated, shuffled and resized."""
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
    """The model's call as TorchScript; what form it took is known from the first call on."""

    def __init__(self, model: nn.Module, kinds: Sequence[str] = KINDS) -> None:
        self._kinds = kinds
        super().__init__(model, ScriptedCall(model, kinds))

    @property
    def form(self) -> str:
        """What the model's call became; empty as long as nothing has called it."""
        return self.call.form if isinstance(self.call, ScriptedCall) else ""

    @property
    def label(self) -> str:  # type: ignore[override]
        """What the report calls it: the form, or those that are open."""
        return self.form or " or ".join(self._kinds)

    @property
    def value(self) -> str | bool:
        """What a plan stores: the form, or True where it is open."""
        return self.form or True


class TorchScript(StepTechnique):
    """Runs the model's forward without Python, as TorchScript: scripted, or traced where it cannot be scripted.

    TorchScript is deprecated upstream since torch 2.11 in favour of ``torch.compile`` and ``torch.export``: it is
    tried where ``torch.compile`` is not to be had (no compiler on the machine, or every trial of it failed), or when
    ``techniques={"torchscript": True}`` asks for it, which leaves ``torch.compile`` out.

    When it helps: models of many small operators, where Python between them is what takes the time. When it hurts:
    large operators gain nothing; a script ignores what Python changes later, and a trace holds one side of every
    branch. So either is compared with the plain model before it is used (outputs on inputs as they come, negated,
    shuffled and resized, in train and in eval mode; gradients), a ``TracerWarning`` refuses a trace, and the model
    runs plain again as soon as one of its attributes, parameters or submodules is replaced, or somebody hooks in.

    Source: https://docs.pytorch.org/docs/stable/jit.html (the deprecation), pytorch #127283 (since which torch), and
    https://docs.pytorch.org/docs/stable/generated/torch.jit.trace.html (what tracing loses). No gain is published
    there for training.
    """

    name = "torchscript"
    number = 11
    title = "TorchScript (deprecated)"
    rationale = (
        "the model's forward runs without Python between its operators; TorchScript is deprecated upstream since "
        "torch 2.11, so a later torch may no longer have it"
    )
    effect = "reseeded"
    values = "True, 'script', 'trace'"
    checks_evaluation = True
    optimistic_gain = 1.5

    def setup_estimate(self, job: Job, pace: Pace) -> float:
        """Scripting and tracing small models, and the calls that compare them."""
        return 2.0

    def check(self, job: Job) -> None:
        """A module whose call is free, in the forms where ``optimize`` knows the calls: ``run.step`` and inference."""
        reason = comes_compiled(job.spec.model)
        if reason:
            raise NotApplicable(reason)
        if any(isinstance(call, CompiledCall) for call in routed_calls(job)):
            raise NotApplicable("torch.compile runs the model already, and does what TorchScript did")
        if job.spec.optimizer is None and not job.spec.inference:
            raise NotApplicable("TorchScript serves run.step alone: give the optimizer to optimize()")

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """The one switch, where ``torch.compile`` is not to be had."""
        if not why_no_compiler(job.spec.device) and "compile" not in job.failed:
            raise NotApplicable(
                "it is deprecated upstream since torch 2.11, and torch.compile is to be had here: "
                "techniques={'torchscript': True} asks for it all the same"
            )
        return [TorchScriptCandidate(job.spec.model)]

    def accepts(self, value: Any) -> bool:
        """Accept True, ``"script"`` or ``"trace"``."""
        return value is True or (isinstance(value, str) and value in KINDS)

    def candidate_of(self, job: Job, value: Any) -> Candidate:
        """Return the candidate for a form; True leaves the form open."""
        return TorchScriptCandidate(job.spec.model, KINDS if value is True else (value,))

    def is_so(self, job: Job, value: Any) -> bool:
        """Return whether the model is already scripted or traced and ``value`` is True, which leaves the kind open."""
        return value is True and isinstance(job.spec.model, torch.jit.ScriptModule)

"""Numerics of a candidate against the baseline's: outputs, gradients and losses of a short run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flatout.core.errors import parameters_of
from flatout.distributed.agreement import Agreement
from flatout.techniques import Candidate, StepTechnique
from flatout.training.stepper import PhaseOf, as_range
from flatout.training.tolerance import ALLOWED, apart, compute_dtype, floats_of
from flatout.tuning.bench import Bench
from flatout.tuning.pairs import Pair
from flatout.tuning.stopwatch import Block, timed_block

if TYPE_CHECKING:
    from flatout.training.job import Job


UPDATES = 8
"""Number of updates whose losses are compared."""

FEWEST_UPDATES = 2
"""Number of compared updates if updates are long. The second loss shows the effect of the first update."""

BATCHES = 2
"""Number of batches whose outputs are compared in a training with an optimizer.

Without an optimizer, the outputs of all trial batches are compared.
"""

GRADIENT_SCALE = 1024.0
"""Factor of the loss in fp16. With this factor, most gradients are normal numbers and none overflows."""

LEEWAY = 3.0
"""Factor on the effect of rounding the weights.

In 2 to 16 residual blocks, rounding every activation changes results 1.3 to 1.7 times as much as rounding the weights.
"""


@dataclass(frozen=True)
class Observed:
    """Results of one run, to be compared.

    Attributes:
        dtype: dtype of products.
        outputs: outputs of the model, by name. ``compute_loss`` hides the outputs, so losses replace them. If a model
            is compiled with its loss, the outputs come from the plain model, and only the losses show a difference.
        gradients: gradients of the first update or of the first batch's loss, by parameter name; empty in inference.
        losses: losses of successive updates; empty without updates.
        blocks: a block for each update. If the forward or an update takes longer than the limit, its block is the last
            one, and the rest is not run.
    """

    dtype: torch.dtype | str
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for group in (self.outputs, self.gradients, self.losses) for t in group.values())


@dataclass(frozen=True)
class Difference:
    """Difference between candidate and baseline in outputs, gradients or losses.

    Attributes:
        what: "outputs", "gradients" or "losses".
        by: the difference, relative to the baseline.
        allowed: the accepted limit.
        where: the tensor with the largest difference.
    """

    what: str
    by: float
    allowed: float
    where: str = ""

    @property
    def fails(self) -> bool:
        """True if the difference exceeds the limit or is NaN."""
        return not self.by <= self.allowed

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.what} differ by {_share(self.by)}{place}, {_share(self.allowed)} is allowed"


def updates_have_gradients(job: Job) -> bool:
    """Return True if the gradients of an update can be read before the optimizer applies them.

    Replayed steps do not stop before the update, and a loss scaler may scale gradients beyond the range of fp16.
    """
    spec, stepper = job.spec, job.stepper
    return spec.optimizer is not None and stepper.scaler is None and stepper.runner is None


def observe(
    job: Job,
    batches: Sequence[Any],
    *,
    evaluation: bool = False,
    updates: int = UPDATES,
    reads_updates: bool = False,
    limit: float = math.inf,
) -> Observed:
    """Return the results of a run from the present state. The run changes the state.

    Args:
        job: the training, with the candidates that are on.
        batches: on the device.
        evaluation: also compare outputs in eval mode, because a candidate can break a branch that training does not
            take.
        updates: number of updates whose losses are compared.
        reads_updates: take the gradients from the first update, which saves a forward and a backward. Requires
            ``updates_have_gradients``.
        limit: seconds of a forward or of an update after which the run ends.
    """
    spec, dtype = job.spec, compute_dtype(job.spec.model)
    if spec.inference:
        return Observed(dtype, _outputs([job.objective.infer(batch) for batch in batches]))
    shown = batches if spec.optimizer is None else batches[:BATCHES]
    outputs: dict[str, Tensor] = {}

    def run(_: int) -> None:
        if evaluation:
            outputs.update(_in_eval_mode(job, shown))
        if spec.compute_loss is None:
            outputs.update(_outputs([_forward(job, batch) for batch in shown]))
        elif spec.optimizer is None:
            outputs.update(_outputs([job.objective.loss(batch) for batch in shown]))

    forward = timed_block(run, range(1), spec.device, spec.ranks)
    if forward.mean > limit:
        return Observed(dtype, outputs, blocks=(forward,))
    gradients = {} if reads_updates else _gradients(job, batches[0])
    if spec.optimizer is None:
        return Observed(dtype, outputs, gradients)
    losses: dict[str, Tensor] = {}
    phase = _reads_gradients(job, gradients) if reads_updates else as_range

    def update(i: int) -> None:
        for k in range(i * spec.accumulate, (i + 1) * spec.accumulate):
            losses[f"of step {k + 1}"] = job.stepper.step(batches[k % len(batches)], phase).float()

    blocks: list[Block] = []
    while len(blocks) < updates and not (blocks and blocks[-1].mean > limit):
        blocks.append(timed_block(update, range(len(blocks), len(blocks) + 1), spec.device, spec.ranks))
    return Observed(dtype, outputs, gradients, losses, tuple(blocks))


def compare(baseline: Observed, candidate: Observed) -> list[Difference]:
    """Compare outputs, gradients and losses with their limits.

    Args:
        baseline: results without the candidate.
        candidate: results with the candidate, from the same state on the same batches.
    """
    coarsest = max(baseline.dtype, candidate.dtype, key=list(ALLOWED).index)
    allowed = ALLOWED[coarsest]
    parts = (
        ("outputs", baseline.outputs, candidate.outputs, allowed.outputs),
        ("gradients", baseline.gradients, candidate.gradients, allowed.gradients),
    )
    found = []
    for what, old, new, most in parts:
        if old or new:
            by, where = apart(old, new)
            found.append(Difference(what, by, most, where))
    if baseline.losses:
        pairs = zip(baseline.losses.values(), candidate.losses.values(), strict=True)
        total = sum(float((old - new).abs()) for old, new in pairs)
        scale = sum(float(old.abs()) for old in baseline.losses.values())
        by = total / scale if scale > 0 else total
        found.append(Difference("losses", by if by == by else float("inf"), allowed.losses))
    return found


def nudge(model: nn.Module, dtype: torch.dtype | str) -> None:
    """Change every weight by up to half a unit in the last place of a dtype. The changes are the same in every call."""
    eps = 2.0**-10 if isinstance(dtype, str) else torch.finfo(dtype).eps
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.is_floating_point()):
            generator = torch.Generator(parameter.device).manual_seed(i)
            size = torch.rand(parameter.shape, generator=generator, device=parameter.device) - 0.5
            parameter.copy_(parameter * (1 + eps * size))


def _outputs(outputs: Sequence[Any], where: str = "") -> dict[str, Tensor]:
    tensors = [t.detach().clone() for output in outputs for t in floats_of(output)]
    return {f"output {i + 1}{where}": torch.view_as_real(t) if t.is_complex() else t for i, t in enumerate(tensors)}


def _forward(job: Job, batch: Any) -> list[Tensor]:
    """Return the tensors of the model's output for a batch. Outputs of parts are concatenated along the samples."""
    parts = job.stepper.micro_batches.parts(batch)
    if len(parts) == 1:
        return floats_of(job.objective.forward(batch)[0])
    found = [
        [t if t.dim() else t * part.share for t in floats_of(job.objective.forward(part.batch)[0])] for part in parts
    ]
    return [torch.cat(same) if same[0].dim() else torch.stack(same).sum() for same in zip(*found, strict=True)]


def _in_eval_mode(job: Job, batches: Sequence[Any]) -> dict[str, Tensor]:
    modes = [(module, module.training) for module in job.spec.model.modules()]
    job.spec.model.eval()
    try:
        with torch.no_grad():
            outputs = [
                job.objective.loss(b) if job.spec.compute_loss is not None else job.objective.forward(b)[0]
                for b in batches
            ]
        return _outputs(outputs, " in eval mode")
    finally:
        for module, training in modes:
            module.training = training


def _gradients(job: Job, batch: Any) -> dict[str, Tensor]:
    """Return the gradients of the batch's loss, by parameter name."""
    parameters = job.spec.trained
    for parameter in parameters:
        parameter.grad = None
    scale = 1.0 if job.stepper.scaler is None else GRADIENT_SCALE
    for part in job.stepper.micro_batches.parts(batch):
        (job.objective(part.batch) * part.share * scale).backward()
    found = {name: p.grad for name, p in _trainable(job).items() if p.grad is not None}
    gradients = {name: gradient.detach().clone() / scale for name, gradient in found.items()}
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _reads_gradients(job: Job, into: dict[str, Tensor]) -> PhaseOf:
    """Return phases for a step that copy the gradients to ``into`` before the update, if ``into`` is empty."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        if name == "update" and not into:
            found = {name: p.grad for name, p in _trainable(job).items() if p.grad is not None}
            into.update({name: gradient.detach().clone() for name, gradient in found.items()})
        with as_range(name):
            yield

    return phase


def _trainable(job: Job) -> dict[str, Tensor]:
    """Return the trainable parameters by name; with an optimizer only its own, as others may keep old gradients."""
    optimizer = job.spec.optimizer
    held = None if optimizer is None else set(map(id, parameters_of(optimizer)))
    return {
        name if module is job.spec.model else f"{type(module).__name__}.{name}": parameter
        for module in job.spec.modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and (held is None or id(parameter) in held)
    }


def _share(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"


_NARROW = torch.float16, torch.bfloat16

_FUSED = "attention", "rnn"
"""Parts of the names of operators that draw inside of a kernel for one dtype."""


class SameDraws(TorchDispatchMode):
    """Dispatch mode in which random operators work on contiguous float32 copies of their arguments.

    torch draws in the order of memory, so the same seed gives an activation in channels_last another dropout mask. On a
    GPU, a kernel for 16-bit numbers assigns random numbers to elements in another way than a kernel for float32. Under
    this mode, an activation gets the same mask in all these forms. The mode cannot reach the random numbers that
    compiled code, attention and recurrent layers draw inside of their kernels.

    Attributes:
        drew: True after the model has drawn random numbers, if all of them were drawn under the mode.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._drew_here = self._drew_elsewhere = False

    @property
    def drew(self) -> bool:
        return self._drew_here and not self._drew_elsewhere

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **keywords)
        if any(part in func._schema.name for part in _FUSED):
            self._drew_elsewhere |= _drops(func, args, keywords)
            return func(*args, **keywords)
        self._drew_here = True
        wide = [_wide(arg) if isinstance(arg, Tensor) else arg for arg in args]
        dtype = keywords.get("dtype") or next((arg.dtype for arg in args if isinstance(arg, Tensor)), None)
        if keywords.get("dtype") in _NARROW:
            keywords = {**keywords, "dtype": torch.float32}
        result = func(*wide, **keywords)
        for given, copy, argument in zip(args, wide, func._schema.arguments, strict=False):
            if given is not copy and argument.is_write:
                given.copy_(copy)  # torch returns the argument and ignores the mode's result
        if dtype not in _NARROW:
            return result
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype is torch.float32 else t, result)


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _drops(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return True if an operator is called with a dropout probability above 0."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | keywords
    return any(bool(value) for name, value in named.items() if name in ("dropout", "dropout_p"))


@dataclass(frozen=True)
class Verification:
    """Result of a verification.

    Attributes:
        differences: differences of outputs, gradients and losses. Empty if the candidate was too slow to finish, or if
            the job has nothing to compare.
        pair: the last update without and with the candidate; None without updates.
        broken: assumption of a technique that the steps so far contradict; empty if there is none.
    """

    differences: list[Difference]
    pair: Pair | None
    broken: str = ""

    @property
    def failure(self) -> str:
        """Text about the broken assumption, or about differences above their limits; empty if there are none."""
        return self.broken or "; ".join(str(difference) for difference in self.differences if difference.fails)


def is_verified(candidate: Candidate, techniques: Sequence[StepTechnique]) -> bool:
    """Return True if a candidate's numerics are compared. Steps with another number of samples have other outputs."""
    return any(technique.is_verified for technique in techniques) and candidate.scale == 1.0


def verify(
    bench: Bench, candidate: Candidate, techniques: Sequence[StepTechnique], limit: float = math.inf
) -> Verification:
    """Compare a candidate's outputs, gradients and losses with the baseline's.

    Args:
        bench: the training.
        candidate: a candidate of one technique, or of several.
        techniques: the techniques of the candidate. The checks of all of them apply.
        limit: seconds of an update with the candidate after which the comparison ends without a result.
    """
    if not is_verified(candidate, techniques):
        return Verification([], None)
    job, ranks, evaluation = bench.job, bench.ranks, any(t.checks_evaluation for t in techniques)
    batches = job.data.batches[: job.spec.accumulate] if bench.is_long else job.data.batches
    updates = FEWEST_UPDATES if bench.is_long else UPDATES
    draws_other_numbers = any(t.effect_on(job) == "reseeded" for t in techniques)
    changes_activations = draws_other_numbers and any(t.changes_activations for t in techniques)
    bench.rewind()
    reads_updates = updates_have_gradients(job)
    with candidate:
        reads_updates = reads_updates and updates_have_gradients(job)

    def seen(draws: SameDraws | None = None, limit: float = math.inf) -> Observed:
        with draws or (SameDraws() if changes_activations else nullcontext()):
            return observe(
                job, batches, evaluation=evaluation, updates=updates, reads_updates=reads_updates, limit=limit
            )

    baseline = bench.baseline_results((evaluation, changes_activations, reads_updates), seen)
    draws = SameDraws() if changes_activations else None
    bench.rewind()
    with candidate:
        observed = seen(draws, limit)
    pair = (baseline.blocks[-1], observed.blocks[-1]) if baseline.blocks else None
    if len(observed.blocks) < len(baseline.blocks):
        return Verification([], pair)
    found = _largest(ranks, compare(baseline, observed))
    if any(d.fails for d in found if d.what != "losses"):
        bench.rewind()
        nudge(job.spec.model, observed.dtype)
        nudged = _largest(ranks, compare(baseline, seen()))
        found = [d if d.what == "losses" else _allow(d, LEEWAY * n.by) for d, n in zip(found, nudged, strict=True)]
    drew_the_same = draws is not None and ranks.all_hold(draws.drew)
    if draws_other_numbers and not drew_the_same and any(d.fails for d in found):
        bench.rewind()
        torch.manual_seed(torch.initial_seed() + 1)
        redrawn = _largest(ranks, compare(baseline, seen()))
        found = [_allow(d, 2 * r.by) for d, r in zip(found, redrawn, strict=True)]
    return Verification(found, pair, _broken(bench, techniques))


def _broken(bench: Bench, techniques: Sequence[StepTechnique]) -> str:
    """Return the first assumption of some techniques that the steps of all ranks so far contradict."""
    guards = [guard for technique in techniques for guard in technique.assumes if guard.is_observed]
    seen = [guard.reason(found) for guard in guards if (found := guard.contradiction(bench.job))]
    return next((reason for of_rank in bench.ranks.every(seen) for reason in of_rank), "") if guards else ""


def _largest(ranks: Agreement, found: list[Difference]) -> list[Difference]:
    """Return each difference on the rank where it is largest."""
    return [replace(d, by=by) for d, by in zip(found, ranks.largest([d.by for d in found]), strict=True)]


def _allow(difference: Difference, much: float) -> Difference:
    return replace(difference, allowed=max(difference.allowed, much))

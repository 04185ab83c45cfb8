"""Equivalence of a candidate and the baseline: outputs, gradients and losses of a short run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout.training.stepper import PhaseOf, as_range
from flatout.training.tolerance import ALLOWED, apart, compute_dtype, floats_of
from flatout.tuning.timing import Block, timed_block

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
    parameters = _trainable(job)
    for parameter in parameters.values():
        parameter.grad = None
    scale = 1.0 if job.stepper.scaler is None else GRADIENT_SCALE
    for part in job.stepper.micro_batches.parts(batch):
        (job.objective(part.batch) * part.share * scale).backward()
    gradients = {name: p.grad.detach().clone() / scale for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
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
    """Return the trainable parameters by name."""
    return {
        name if module is job.spec.model else f"{type(module).__name__}.{name}": parameter
        for module in job.spec.modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _share(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"

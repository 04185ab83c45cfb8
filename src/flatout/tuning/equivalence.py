"""Does a candidate train the same model? Outputs, gradients and losses of a short run, beside the baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout.training.tolerance import ALLOWED, apart, compute_dtype, floats_of

if TYPE_CHECKING:
    from flatout.training.job import Job

UPDATES = 8
"""Updates whose losses are compared."""

BATCHES = 2
"""Batches whose outputs are compared where an optimizer trains; without one it is all that trials have."""

GRADIENT_SCALE = 1024.0
"""What a loss is multiplied with for gradients in fp16: most become normal numbers, and none overflows."""

LEEWAY = 3.0
"""Rounding every activation changes 1.3 to 1.7 times as much as rounding the weights: 2 to 16 residual blocks."""


@dataclass(frozen=True)
class Observed:
    """What to compare.

    Attributes:
        dtype: that products are computed in.
        outputs: of the model, by name; empty where ``compute_loss`` hides them: then the losses stand for them, as they
            do for a model that is compiled with its loss, and alone runs plain.
        gradients: by the parameter's name, of the first batch's loss; empty in inference.
        losses: of the batches of ``UPDATES`` updates; empty where nothing is updated.
    """

    dtype: torch.dtype | str
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    losses: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """How far a candidate is from the baseline, in one of the three.

    Attributes:
        what: "outputs", "gradients" or "losses".
        by: relative to the baseline's size.
        allowed: the most that is accepted.
        where: the tensor that differs most.
    """

    what: str
    by: float
    allowed: float
    where: str = ""

    @property
    def fails(self) -> bool:
        """Whether it is more than is accepted; a NaN is."""
        return not self.by <= self.allowed

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.what} differ by {_share(self.by)}{place}, {_share(self.allowed)} is allowed"


def observe(job: Job, batches: Sequence[Any], *, evaluation: bool = False) -> Observed:
    """What to compare, from the present state on; the state has moved afterwards.

    Args:
        job: runs with what is on now.
        batches: on the device.
        evaluation: also look at the outputs in eval mode, because what is tried can break a branch that training does
            not take.
    """
    dtype = compute_dtype(job.spec.model)
    if job.spec.inference:
        return Observed(dtype, _outputs([job.objective.infer(batch) for batch in batches]))
    shown = batches if job.spec.optimizer is None else batches[:BATCHES]
    outputs: dict[str, Tensor] = {}
    if evaluation:
        outputs = _in_eval_mode(job, shown)
    if job.spec.compute_loss is None:
        outputs |= _outputs([_forward(job, batch) for batch in shown])
    elif job.spec.optimizer is None:
        outputs |= _outputs([job.objective.loss(batch) for batch in shown])
    gradients = _gradients(job, batches[0])
    losses: dict[str, Tensor] = {}
    if job.spec.optimizer is not None:
        steps = range(UPDATES * job.spec.accumulate)
        losses = {f"of step {i + 1}": job.stepper.step(batches[i % len(batches)]).float() for i in steps}
    return Observed(dtype, outputs, gradients, losses)


def compare(baseline: Observed, candidate: Observed) -> list[Difference]:
    """Outputs, gradients and losses, each beside what is accepted.

    Args:
        baseline: without the candidate.
        candidate: with it, from the same state on the same batches.
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
    """Change every weight by up to half a unit in the last place of a dtype, always in the same way."""
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
    """The tensors of the model's output for a batch; what its parts give is put together along the samples."""
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
    """Of the batch's loss, by the parameter's name."""
    parameters = {
        name if module is job.spec.model else f"{type(module).__name__}.{name}": parameter
        for module in job.spec.modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for parameter in parameters.values():
        parameter.grad = None
    scale = 1.0 if job.stepper.scaler is None else GRADIENT_SCALE
    for part in job.stepper.micro_batches.parts(batch):
        (job.objective(part.batch) * part.share * scale).backward()
    gradients = {name: p.grad.detach().clone() / scale for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def _share(value: float) -> str:
    return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"

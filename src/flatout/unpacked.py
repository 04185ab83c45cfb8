"""Lines on stderr when a ``Run`` is unpacked into model and loader, for the user's own loop."""

from __future__ import annotations

from typing import Any

from flatout.core import formatting
from flatout.report import wording
from flatout.report.model import Summary
from flatout.training.job import Job


def lines(summary: Summary, job: Job, scheduler: Any) -> list[str]:
    """Return three lines: the result, how to train, and how to get the report or revert everything."""
    used = [row.technique for row in summary.in_use if row not in summary.rules]
    return [
        f"{wording.headline(summary)}. In use: {', '.join([*used, formatting.counted(len(summary.rules), 'rule')])}",
        _how_to_train(job, scheduler),
        "flatout.report_of(model) returns the report, flatout.undo(model) reverts everything",
    ]


def _how_to_train(job: Job, scheduler: Any) -> str:
    if job.spec.inference:
        return "call the model under torch.inference_mode(): its forward is tuned, for inference"
    if job.spec.optimizer is None:
        return "keep your loop. To fuse the optimizer, too: model, loader = flatout.optimize(model, loader, optimizer)"
    missing = _only_in_step(job, scheduler)
    if missing:
        return f"only run.step has {', '.join(missing)}. Leave out the loss to tune a loop of your own"
    return "keep your loop: zero_grad, forward, loss, backward, optimizer.step"


def _only_in_step(job: Job, scheduler: Any) -> list[str]:
    """Return the parts of ``run.step`` that the user's own loop does not have."""
    stepper = job.stepper
    parts = {
        "the loss scaler that fp16 needs": stepper.scaler is not None,
        "cuda_graph": stepper.runner is not None,
        "compile": job.objective.compiled is not None,
        f"micro-batches of {stepper.micro_batches.size}": stepper.micro_batches.size is not None,
        f"accumulate={stepper.accumulate}": stepper.accumulate > 1,
        f"max_grad_norm={job.spec.max_grad_norm}": job.spec.max_grad_norm is not None,
        "the learning-rate schedule": scheduler is not None,
    }
    return [part for part, is_there in parts.items() if is_there]

"""Mean loss and metrics over a loader, without gradients, on one or several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatout.core.batches import batch_size_of, to_device
from flatout.data.order import BatchShare, slices_of
from flatout.data.prefetcher import Prefetcher
from flatout.data.slices import sliced, why_not_sliced
from flatout.training.job import Job
from flatout.training.loader import TrainingLoader
from flatout.training.stepper import weighted

Metric = Callable[[Any, Any], Any]
"""``(outputs, batch) -> mean over the batch``, a number or a 0-dim tensor."""


class Evaluation:
    """Mean loss and metrics of a job over loaders.

    On several ranks, each rank computes its slice of every batch of a plain ``DataLoader`` over a map-style dataset.
    Any other loader is iterated unchanged, and may yield different samples or the same samples on each rank. The
    results are means over the samples of all ranks. The loss is weighted by ``Spec.loss_weight`` if given.

    Args:
        job: the training.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kept: tuple[Any, Prefetcher] | None = None
        """The last loader with persistent workers, and the loader of its slices."""

    def means(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return the mean loss and the mean of each metric over all samples of a loader.

        All ranks must call this together. The model is in eval mode during the evaluation, and in its previous modes
        after it. A loss that only the user's own loop computes is left out.

        Raises:
            ValueError: the loader yielded no batch, or ranks have different metrics.
        """
        job, ranks = self._job, self._job.spec.ranks
        with ranks.attempt("run.evaluate"):
            ranks.check()
            if job.stepper.sync is not None:
                job.stepper.sync.broadcast_buffers()
            found = ranks.every(self._sums(self._own(loader), metrics))
        samples = sum(totals["samples"] for totals, _ in found)
        names = [list(sums) for _, sums in found]
        if any(other != names[0] for other in names):
            shown = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(names))
            raise ValueError(f"metrics must be the same on all ranks, got {shown}. Pass them on every rank")
        if samples == 0:
            raise ValueError("eval loader yielded no batch")
        weights = {name: samples for name in names[0]}
        if job.spec.loss_weight is not None and "loss" in weights:
            weights["loss"] = sum(totals["loss_weight"] for totals, _ in found) or math.nan
        return {name: sum(sums[name] for _, sums in found) / weight for name, weight in weights.items()}

    def _own(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return the loader of this rank's slices, or ``loader`` if it is not sliced."""
        if self._kept is not None and self._kept[0] is loader:
            return self._kept[1]
        made: Any = loader if why_not_sliced(loader) else sliced(loader, self._job.spec.ranks)
        if slices_of(made) is None:
            return loader
        own = Prefetcher(made, "cpu")
        if made.persistent_workers:
            self._kept = loader, own
        return own

    def _sums(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> tuple[dict[str, float], dict[str, float]]:
        """Return samples and weight of the loss on this rank, and the weighted sums of loss and metrics."""
        objective = self._job.objective
        names = [*(["loss"] if objective.has_loss else []), *metrics]
        totals = {name: torch.zeros(()) for name in names}
        samples, loss_weight = 0, torch.zeros((), dtype=torch.float64)
        with _evaluated(objective.spec.model) as outputs:
            for batch in loader:
                share = loader.share if isinstance(loader, (Prefetcher, TrainingLoader)) else None
                size = batch_size_of(batch) if share is None else share.own
                batch = to_device(batch, objective.spec.device)
                if size == 0:
                    continue  # a mean over no samples is NaN
                weight = self._loss_weight(batch, size, share)
                outputs.clear()
                loss = objective.loss(batch)
                values = {"loss": (weight, loss)} if objective.has_loss else {}
                values |= {name: (size, metric(outputs[-1], batch)) for name, metric in metrics.items()}
                for name, (factor, value) in values.items():
                    totals[name] = totals[name] + weighted(torch.as_tensor(value).float(), factor)
                samples += size
                loss_weight = loss_weight + weight
        sums = {name: float(total) for name, total in totals.items()}
        return {"samples": samples, "loss_weight": float(loss_weight)}, sums

    def _loss_weight(self, batch: Any, size: int, share: BatchShare | None) -> float | Tensor:
        """Return the factor of this rank's loss, so that the sum over all ranks is the sum of the whole batch."""
        micro = self._job.stepper.micro_batches
        if self._job.spec.loss_weight is not None:
            return micro.weight_of(batch)
        return share.total if share is not None and micro.sums_losses else size


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[list[Any]]:
    """Set a model to eval mode under ``inference_mode``, and collect the outputs of its calls."""
    outputs: list[Any] = []
    modes: list[tuple[nn.Module, bool]] = [(m, m.training) for m in model.modules()]
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        model.eval()
        with torch.inference_mode():
            yield outputs
    finally:
        hook.remove()
        for module, training in modes:
            module.training = training

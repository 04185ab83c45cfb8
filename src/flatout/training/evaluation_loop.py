"""Evaluation: mean loss and metrics over a loader, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from flatout.core.batches import batch_size_of, to_device
from flatout.training.objective import Objective

Metric = Callable[[Any, Any], Any]
"""``(outputs, batch) -> mean over the batch``, a number or a 0-dim tensor."""


def evaluate(objective: Objective, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the mean loss and metrics over a loader, weighted by samples.

    The model is in eval mode during the evaluation, and in its own modes afterwards. A loss that only the user's own
    loop knows is left out.

    Raises:
        ValueError: the loader yielded no batch.
    """
    model = objective.spec.model
    outputs: list[Any] = []
    modes = [(m, m.training) for m in model.modules()]
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    totals: dict[str, Tensor] = {}
    samples = 0
    try:
        model.eval()
        with torch.inference_mode():
            for batch in loader:
                size = batch_size_of(batch)
                if size == 0:
                    continue  # a mean over no samples is NaN
                batch = to_device(batch, objective.spec.device)
                outputs.clear()
                loss = objective.loss(batch)
                values = {"loss": loss} if objective.has_loss else {}
                values |= {name: metric(outputs[-1], batch) for name, metric in metrics.items()}
                for name, value in values.items():
                    totals[name] = totals.get(name, torch.zeros(())) + size * torch.as_tensor(value).float()
                samples += size
    finally:
        hook.remove()
        for module, training in modes:
            module.training = training
    if samples == 0:
        raise ValueError("eval loader yielded no batch")
    return {name: float(total) / samples for name, total in totals.items()}

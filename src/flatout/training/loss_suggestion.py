"""Line of code for errors about batches, with a ``compute_loss`` that fits the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

LABELS = ("labels", "label", "targets", "target", "y", "gt", "classes", "class")
"""Common names of targets in a batch, the most likely first."""


def compute_loss_line(model: nn.Module, batch: Any, *, has_loss_fn: bool) -> str:
    """Return ``compute_loss=lambda model, batch: ...`` with the keys, positions or attributes of a batch.

    Args:
        model: the model, whose ``forward`` signature names the inputs.
        batch: a batch that does not fit ``loss_fn(model(x), y)`` or ``model(**batch).loss``.
        has_loss_fn: True if the user passed a ``loss_fn``, so that the model does not compute the loss.
    """
    if isinstance(batch, Mapping):
        line = _of_names(model, {key: f"batch[{key!r}]" for key in batch}, has_loss_fn)
    elif isinstance(batch, Sequence) and len(batch) > 1:
        count = min(max(1, len(_required(model))), len(batch) - 1)
        inputs = [f"batch[{i}]" for i in range(count)]
        if count == 1 and isinstance(batch[0], (Mapping, list, tuple)):
            inputs = [("**" if isinstance(batch[0], Mapping) else "*") + inputs[0]]
        line = f"loss_fn(model({', '.join(inputs)}), batch[{count}])"
    else:
        label = next((name for name in LABELS if hasattr(batch, name)), "y")
        names = [name for name in _required(model) if hasattr(batch, name)]
        inputs = [f"batch.{name}" for name in names] if len(names) == len(_required(model)) else ["batch"]
        line = f"loss_fn(model({', '.join(inputs)}), batch.{label})"
    return f"compute_loss=lambda model, batch: {line}"


def why_not_taken(model: nn.Module, batch: Any) -> str:
    """Return the reason why ``forward`` cannot take such a batch.

    The reason is empty if ``forward`` can take the batch, or if its signature is not readable.
    """
    signature = _signature(model)
    if signature is None:
        return ""
    args, named = ((), batch) if isinstance(batch, Mapping) else ((None,), {})
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        given = f"the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else "one input"
        return f"batches must hold what {type(model).__name__}.forward takes, got {given} ({error})"
    return ""


def _of_names(model: nn.Module, places: dict[str, str], has_loss_fn: bool) -> str:
    """Return the expression of the loss, for a batch with named parts.

    Args:
        model: the model.
        places: the expression of each part, by name.
        has_loss_fn: see ``compute_loss_line``.
    """
    signature, required = _signature(model), _required(model)
    parameters = {} if signature is None else signature.parameters
    label = next((name for name in LABELS if name in places), None)
    taken = [name for name in places if name in parameters]
    own_loss = not has_loss_fn and label in taken
    if not own_loss:
        label = label or next((name for name in reversed(places) if name not in taken), [*places, "labels"][-1])
        taken = [name for name in taken if name != label]
    if set(required) <= set(taken):
        call = f"model({', '.join(f'{name}={places[name]}' for name in taken)})"
    else:
        others = [place for name, place in places.items() if name != label]
        call = f"model({', '.join(others[: max(1, len(required))])})"
    return f"{call}.loss" if own_loss else f"loss_fn({call}, {places.get(label or '', 'labels')})"


def _signature(model: nn.Module) -> inspect.Signature | None:
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def _required(model: nn.Module) -> list[str]:
    """Return the names of the required arguments of ``forward``."""
    signature = _signature(model)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = () if signature is None else signature.parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]

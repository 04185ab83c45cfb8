"""Samplers whose next indices may depend on the training, as in hard-example mining."""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from flatout.core.contents import named_values
from flatout.core.random_state import RandomState
from flatout.data.loader_class import base_of
from flatout.data.loaders import TORCHS_SAMPLERS, original_of

_READY: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})), type(iter(set())))
"""Types of iterators over elements that are ready when the epoch begins."""
_FIXED = (int, float, complex, str, bytes, type(None), torch.Generator, np.random.Generator, types.ModuleType)


def why_not_ahead(loader: Any) -> str:
    """Return why the next indices of a loader may depend on the training, as a clause. Empty if they do not.

    Only a sampler of the user can depend on it. Its ``__iter__`` must return an iterator over ready elements, or be a
    generator function that reads only numbers, strings and random generators. All other values that its code names may
    change between two batches: attributes, globals, values of closures, and attributes of the dataset.
    """
    if type(loader).__module__.startswith("flatout.data."):
        loader = getattr(loader, "loader", loader)
    base = base_of(loader)
    if base is None:
        return ""
    base = original_of(base)
    return _reason(base.sampler if base.batch_sampler is None else base.batch_sampler, base.dataset)


def _reason(order: Any, dataset: Any) -> str:
    kind = type(order)
    if kind in (*TORCHS_SAMPLERS, list, tuple, range):
        return ""
    if kind is BatchSampler:
        return _reason(order.sampler, dataset)
    iterate = getattr(kind, "__iter__", None)
    if isinstance(iterate, types.FunctionType) and not inspect.isgeneratorfunction(iterate) and _is_ready(order):
        return ""
    named, used = named_values(kind, "__iter__")
    if not used:
        return f"the code of {kind.__name__}.__iter__ cannot be read"
    held = {f"attribute {name!r}": value for name, value in getattr(order, "__dict__", {}).items() if name in used}
    of_dataset = {
        f"attribute {name!r} of the dataset": value
        for name, value in getattr(dataset, "__dict__", {}).items()
        if name in used and any(value is dataset for value in held.values())
    }
    for name, value in {**held, **named, **of_dataset}.items():
        is_code = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod))
        if value is dataset or isinstance(value, _FIXED) or is_code:
            continue
        if not isinstance(value, (Sampler, range)) or _reason(value, dataset):
            return f"a {kind.__name__} reads {name} when it draws a batch"
    return ""


def _is_ready(order: Any) -> bool:
    """Return True if a sampler draws all indices when it is iterated. The sampler does not change."""
    saved = dict(getattr(order, "__dict__", {}))
    try:
        with RandomState.capture(order).restored():
            return type(iter(order)) in _READY
    except Exception:  # of the user's code
        return False
    finally:
        if saved:
            vars(order).clear()
            vars(order).update(saved)

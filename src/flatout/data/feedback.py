"""Samplers whose next indices may depend on the training, as in hard-example mining."""

from __future__ import annotations

import contextlib
import dis
import inspect
import random
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from flatout.core.contents import functions_of, named_values
from flatout.core.snapshot import Snapshot
from flatout.data.loader_class import base_of
from flatout.data.loaders import TORCHS_SAMPLERS, original_of, unwrapped

_READY: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})), type(iter(set())))
"""Types of iterators over elements that are ready when the epoch begins."""
_known: weakref.WeakKeyDictionary[Sampler[Any], bool] = weakref.WeakKeyDictionary()
"""Results of ``_is_ready`` by sampler. The prefetcher asks in each epoch, and a search takes milliseconds."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_FIXED = (int, float, complex, str, bytes, type(None), types.ModuleType, *_GENERATORS)


def why_not_ahead(loader: Any) -> str:
    """Return why the next indices of a loader may depend on the training, as a clause. Empty if they do not.

    Only a sampler of the user can depend on it. Its ``__iter__`` must return an iterator over ready elements, or be a
    generator function that reads only numbers, strings and random generators. All other values that its code names may
    change between two batches: attributes, globals, values of closures, and attributes of the dataset.

    An epoch that the training ends early must leave the sampler where it was without reading ahead. So a sampler must
    not write an attribute, or draw from a generator that it holds, between two batches.
    """
    loader = unwrapped(loader)
    if type(loader).__module__.startswith("flatout.data."):
        loader = getattr(loader, "loader", loader)
    base = base_of(loader)
    if base is None:
        return ""
    base = original_of(base)
    return _reason(base.sampler if base.batch_sampler is None else base.batch_sampler, base.dataset)


def _reason(order: Any, dataset: Any) -> str:
    kind = type(order)
    if (
        kind is RandomSampler
        and order.generator is not None
        and (order.replacement or order.num_samples > len(order.data_source))
    ):
        return _moves("RandomSampler", "generator")
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
    generators = {name for name, value in getattr(order, "__dict__", {}).items() if isinstance(value, _GENERATORS)}
    moved = next(_moved_between_batches(kind, generators), "")
    return moved and _moves(kind.__name__, moved)


def _moves(kind: str, name: str) -> str:
    return f"a {kind} changes its {name!r} when it draws a batch, and the training may end an epoch early"


def _moved_between_batches(kind: type, generators: set[str]) -> Iterator[str]:
    """Yield the attributes that ``__iter__`` writes, and the generators that it uses, after its first batch."""
    functions = functions_of(kind)
    called = [function for function in functions if function.__name__ == "__iter__"]
    for function in called:  # which the loop extends
        code = list(dis.get_instructions(function))
        if function.__name__ == "__iter__":
            jumps = [each.argval for each in code if each.opcode in _JUMPS and each.argval <= each.offset]
            first = min([each.offset for each in code if each.opname == "YIELD_VALUE"] + jumps, default=0)
            code = [each for each in code if each.offset >= first]  # what may run between two batches
        for each in code:
            if each.opname == "STORE_ATTR" or (
                each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in generators
            ):
                yield each.argval
        names = {each.argval for each in code if isinstance(each.argval, str)}
        called += [other for other in functions if other.__name__ in names and other not in called]


def _is_ready(order: Any) -> bool:
    """Return True if a sampler draws all indices when it is iterated. All that the sampler reaches is put back."""
    with contextlib.suppress(KeyError, TypeError):  # new, or without a hash
        return _known[order]
    ready = False
    # An error is one of the user's code, or says that this code cannot be repeated.
    with contextlib.suppress(Exception), Snapshot.capture([], code=[order]).repeatable():
        ready = type(iter(order)) in _READY
    with contextlib.suppress(TypeError):
        _known[order] = ready
    return ready

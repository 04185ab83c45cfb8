"""Operations on batches of any nesting: find tensors, map over tensors, move, copy, split."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flatout.core.reachable import reachable


def _keep(leaf: Any) -> Any:
    return leaf


def _never(container: Any) -> bool:
    return False


def map_tensors(
    fn: Callable[[Tensor], Any],
    batch: Any,
    other: Callable[[Any], Any] = _keep,
    is_leaf: Callable[[Any], bool] = _never,
) -> Any:
    """Rebuild ``batch`` with ``fn`` applied to each of its tensors, in order.

    Visits mappings, sequences, named tuples and dataclasses, and keeps their types. A container that cannot be rebuilt
    as its own type becomes a plain ``dict`` or ``list``, as in torch's collate.

    Args:
        fn: called once per tensor.
        batch: any nesting.
        other: applied to every leaf that is neither a tensor, a string, a number nor ``None``.
        is_leaf: called with each plain list and tuple. A container for which ``is_leaf`` returns True is a leaf.

    Returns:
        A new batch. Containers are never changed in place.
    """
    if isinstance(batch, Tensor):
        return fn(batch)
    if batch is None or isinstance(batch, (str, bytes, int, float, complex)):
        return batch
    if isinstance(batch, PackedSequence):  # a named tuple whose parts must not be mapped one by one
        return other(batch)
    if isinstance(batch, Mapping):
        return _rebuilt_mapping(batch, {key: map_tensors(fn, value, other, is_leaf) for key, value in batch.items()})
    if type(batch) in (tuple, list) and is_leaf(batch):
        return other(batch)
    if isinstance(batch, tuple):
        parts = [map_tensors(fn, value, other, is_leaf) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return tuple(parts) if type(batch) is tuple else _rebuilt(batch, parts)
    if type(batch) is list:
        return [map_tensors(fn, value, other, is_leaf) for value in batch]
    if isinstance(batch, Sequence) and not isinstance(batch, (bytearray, memoryview, range)):
        return _rebuilt_sequence(batch, [map_tensors(fn, value, other, is_leaf) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        rebuilt = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                # `dataclasses.replace` would run __post_init__ again, and reject fields that are not arguments.
                object.__setattr__(rebuilt, field.name, map_tensors(fn, getattr(batch, field.name), other, is_leaf))
        return rebuilt
    return other(batch)


def _rebuilt(container: Any, parts: Any) -> Any:
    try:
        return type(container)(parts)
    except TypeError:
        return dict(parts) if isinstance(parts, dict) else list(parts)


def _rebuilt_mapping(batch: Mapping, items: dict) -> Any:
    if type(batch) is dict:
        return items
    if isinstance(batch, MutableMapping):
        # A copy keeps attributes of the mapping, such as a default factory.
        try:
            rebuilt = copy.copy(batch)
            rebuilt.update(items)
            return rebuilt
        except TypeError:
            return items
    return _rebuilt(batch, items)


def _rebuilt_sequence(batch: Sequence, parts: list) -> Any:
    if isinstance(batch, MutableSequence):
        try:
            rebuilt = copy.copy(batch)
            for i, part in enumerate(parts):
                rebuilt[i] = part
            return rebuilt
        except TypeError:
            return parts
    return _rebuilt(batch, parts)


def with_own_containers(batch: Any) -> Any:
    """Copy the containers of ``batch`` around the same tensors, for code that may add or remove entries.

    Objects with a ``to`` method are copied by ``copy.copy``.

    Args:
        batch: any nesting.
    """
    kind = type(batch)
    if kind is Tensor or (kind is tuple and all(type(part) is Tensor for part in batch)):
        return batch  # fast path for every step: a tuple of tensors cannot gain or lose entries
    return map_tensors(_keep, batch, _copied_object)


def _copied_object(leaf: Any) -> Any:
    if isinstance(leaf, (type, nn.Module, PackedSequence)) or not callable(getattr(leaf, "to", None)):
        return leaf
    try:
        return copy.copy(leaf)
    except Exception:  # raised by the user's class
        return leaf


def cloned(batch: Any) -> Any:
    """Copy ``batch``, so that the loader may reuse its memory.

    Copies tensors, arrays and containers. Objects are copied by their ``clone`` method, else by ``copy.deepcopy``, with
    the tensors that they refer to. Modules, classes, functions and generators stay shared, and so do objects that
    cannot be copied. An object that occurs twice in ``batch`` also occurs twice in the copy.

    Args:
        batch: any nesting.
    """
    clones: dict[int, tuple[Any, Any]] = {}  # keeps the originals alive, so that no id is reused

    def clone_tensor(tensor: Tensor) -> Tensor:
        if id(tensor) not in clones:
            clones[id(tensor)] = tensor, _cloned_tensor(tensor)
        return clones[id(tensor)][1]

    def clone_object(leaf: Any) -> Any:
        if id(leaf) not in clones:
            clones[id(leaf)] = leaf, _cloned_object(leaf, clone_tensor)
        return clones[id(leaf)][1]

    return map_tensors(clone_tensor, batch, clone_object)


def _cloned_tensor(tensor: Tensor) -> Tensor:
    clone = tensor.detach().clone().requires_grad_(tensor.requires_grad) if tensor.is_leaf else tensor.clone()
    return clone.pin_memory() if tensor.is_pinned() else clone


_SHARED = (type, nn.Module, torch.Generator, np.random.Generator, np.random.RandomState, torch.optim.Optimizer)


def _cloned_object(leaf: Any, clone_tensor: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, _SHARED):
        return leaf
    try:
        if isinstance(leaf, PackedSequence):
            return type(leaf)(*(part if part is None else part.clone() for part in leaf))  # type: ignore[arg-type]
        if callable(getattr(leaf, "clone", None)):
            return leaf.clone()
        # `deepcopy` takes the entries of `memo` for copies that it has made. Tensors with a graph have no deep copy.
        memo: dict[int, Any] = {}
        for node in reachable(leaf):
            if isinstance(node, Tensor):
                memo[id(node)] = clone_tensor(node)
            elif isinstance(node, _SHARED):
                memo[id(node)] = node
        return copy.deepcopy(leaf, memo)
    except Exception:  # raised by the user's class
        return leaf


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of ``batch``, in the order in which :func:`map_tensors` visits them."""
    found: list[Tensor] = []
    _collect(batch, found, [])
    return found


def objects_of(batch: Any) -> list[Any]:
    """Return the objects of ``batch`` that have a ``to`` method and are not tensors, in order."""
    others: list[Any] = []
    _collect(batch, [], others)
    return [leaf for leaf in others if not isinstance(leaf, (type, nn.Module)) and callable(getattr(leaf, "to", None))]


def tensors_within(batch: Any) -> list[Tensor]:
    """Return the tensors of ``batch``, then the tensors in attributes of its objects that have a ``to`` method.

    A tensor that such an object keeps in a library's memory, outside of its attributes, is not found.
    """
    found: list[Tensor] = []
    left: list[Any] = [batch]
    seen: set[int] = set()
    for part in left:  # grows inside the loop
        _collect(part, found, [])
        new = [leaf for leaf in objects_of(part) if id(leaf) not in seen]
        seen.update(map(id, new))
        left.extend(map(_attributes, new))
    return found


def _attributes(leaf: Any) -> list[Any]:
    if isinstance(leaf, PackedSequence):
        return list(leaf)
    slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in slots)]


def _collect(batch: Any, found: list[Tensor], others: list[Any]) -> None:
    kind = type(batch)
    if kind is Tensor or isinstance(batch, Tensor):
        found.append(batch)
    elif kind is tuple or kind is list:  # this runs in every step, so the common types come first
        for part in batch:
            _collect(part, found, others)
    elif kind is dict:
        for part in batch.values():
            _collect(part, found, others)
    elif batch is None or isinstance(batch, (str, bytes, int, float, complex)):
        return
    elif isinstance(batch, PackedSequence):
        others.append(batch)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            _collect(part, found, others)
    elif isinstance(batch, Sequence) and not isinstance(batch, (bytearray, memoryview, range)):
        for part in batch:
            _collect(part, found, others)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                _collect(getattr(batch, field.name), found, others)
    else:
        others.append(batch)


def sizes_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the sizes of a tensor as numbers. All sizes of a nested tensor except the first are -1, as they vary."""
    return (tensor.size(0), *[-1] * (tensor.dim() - 1)) if tensor.is_nested else tuple(tensor.shape)


def batch_size_of(batch: Any) -> int:
    """Return the number of samples in ``batch``.

    The number is the leading dimension of the batch's first tensor, or 1 for a 0-dim tensor. Empty tensors, such as
    the boxes of an image without objects, are skipped if another tensor has samples.

    If ``batch`` holds no tensor, its first object with a ``to`` method counts. The number is the object's
    ``num_graphs`` or ``batch_size``, else its ``len``, else the samples of the tensors in its attributes, else 1. The
    ``len`` of an object with ``keys()`` does not count, because it is a number of keys.

    Raises:
        ValueError: ``batch`` holds neither tensors nor such objects.
    """
    sizes = [tensor.size(0) if tensor.dim() else 1 for tensor in tensors_of(batch)]
    if sizes:
        return next((size for size in sizes if size), 0)
    for leaf in objects_of(batch):
        return _samples_of(leaf)
    raise ValueError(f"batch must hold at least one tensor, got {type(batch).__name__} without any")


def _samples_of(leaf: Any) -> int:
    """Return the number of samples of an object that is a batch or a part of one."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    for name in ("num_graphs", "batch_size"):
        number = getattr(leaf, name, None)
        if isinstance(number, tuple) and number:  # a torch.Size
            number = number[0]
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    if hasattr(type(leaf), "__len__") and not hasattr(leaf, "keys"):
        return len(leaf)
    within = tensors_within(leaf)
    return batch_size_of(within) if within else 1


def tokens_of(batch: Any) -> int:
    """Return the number of tokens in ``batch``.

    Token ids are a first tensor of 32- or 64-bit integers in two dimensions. For other batches the result is 0.
    """
    tensors = tensors_of(batch)
    if not tensors or tensors[0].dim() != 2 or tensors[0].dtype not in (torch.int32, torch.int64):
        return 0
    return tensors[0].numel()


class _Whole(Exception):
    """A part of a batch cannot be split."""


def split(batch: Any, sizes: Sequence[int]) -> list[Any] | None:
    """Split a batch along its samples, which are the first dimension of its tensors.

    Tensors and NumPy arrays whose first dimension is the batch size are narrowed, so the parts are views. Lists and
    tuples with one entry per sample are sliced. Examples are file names, targets of detection and lists of numbers. If
    the first dimension of all tensors in such a list is the batch size, the tensors are narrowed instead. Anything else
    (a mask, class weights, a tuple of numbers) goes to every part.

    Args:
        batch: any nesting.
        sizes: number of samples of each part. The sum of ``sizes`` is ``batch_size_of(batch)``.

    Returns:
        The parts, with the types of ``batch``. None if the batch cannot be split, because it holds a
        ``PackedSequence``, a sparse or nested tensor, or an object with a ``to`` method.
    """
    ends = list(itertools.accumulate(sizes))
    try:
        return [_picked(batch, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    except _Whole:
        return None


def resized(batch: Any, samples: int) -> Any:
    """Return a batch of ``samples`` samples, which are the first samples of ``batch``, repeated as often as needed.

    Args:
        batch: any nesting. The parts that :func:`split` would split are resized.
        samples: number of samples, >= 1.

    Returns:
        The new batch. None if ``batch`` cannot be split.
    """
    count = batch_size_of(batch)
    try:
        if samples <= count:
            return _picked(batch, slice(0, samples))
        return _picked(batch, [i % count for i in range(samples)])
    except _Whole:
        return None


def thinned(batch: Any, samples: int) -> Any:
    """Return a batch of ``samples`` of the samples of ``batch``, evenly spread. None if ``batch`` cannot be split."""
    count = batch_size_of(batch)
    try:
        return _picked(batch, [i * count // samples for i in range(samples)])
    except _Whole:
        return None


def _picked(batch: Any, index: slice | list[int]) -> Any:
    """Return some samples of a batch.

    Raises:
        _Whole: the batch cannot be split.
    """
    count = batch_size_of(batch)

    def is_along(tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.size(0) == count

    def has_entries(container: Sequence) -> bool:
        """Return True if a container has one entry per sample. A tuple of numbers counts as a size."""
        if container is batch or len(container) != count:
            return False
        if type(container) is tuple and all(isinstance(entry, (int, float)) for entry in container):
            return False
        tensors = [tensor for tensor in tensors_of(container) if tensor.dim()]
        return not tensors or not all(map(is_along, tensors))

    def picked(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise _Whole
        return tensor[index] if is_along(tensor) else tensor

    def other(leaf: Any) -> Any:
        if isinstance(leaf, (tuple, list)) and not isinstance(leaf, PackedSequence):
            return leaf[index] if isinstance(index, slice) else type(leaf)(leaf[i] for i in index)
        if isinstance(leaf, np.ndarray):
            return leaf[index] if leaf.shape[:1] == (count,) else leaf
        if callable(getattr(leaf, "to", None)) and not isinstance(leaf, type):
            raise _Whole
        return leaf

    return map_tensors(picked, batch, other, has_entries)


def to_device(batch: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
    """Move every tensor of ``batch``, and every object that has a ``to`` method, to ``device``.

    Args:
        batch: any nesting. Strings, numbers and ``None`` are not changed.
        device: the target device.
        non_blocking: return before copies from pinned memory have finished, as ``Tensor.to`` does.
    """
    if type(batch) in (tuple, list):  # fast path for every step
        for part in batch:
            if type(part) is not Tensor or part.device != device:
                break
        else:
            return batch

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=non_blocking)

    return map_tensors(move, batch, lambda leaf: move_object(leaf, device))


def move_object(leaf: Any, device: torch.device | str | int) -> Any:
    """Return ``leaf.to(device)`` if ``leaf`` is an object with a ``to`` method, else ``leaf`` itself."""
    move = getattr(leaf, "to", None)
    return move(device) if callable(move) and not isinstance(leaf, type) else leaf

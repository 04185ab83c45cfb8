"""Bit-exact record of every object below some roots, independent of flatout's own handling of training state."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import operator
import pathlib
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, range)
OPAQUE = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, pathlib.PurePath)
THEIRS = "their_"
"""Prefix of attributes that user code changes. flatout promises nothing about such attributes."""

VALUES = frozenset({"bits", "value"})
"""Aspects that techniques never change. All other aspects may change, and ``undo`` restores them."""
STRUCTURE = frozenset({"bits", "value", "keys", "type", "layout", "same as"})
"""Aspects that are equal in two trainings of one job."""


@dataclasses.dataclass(frozen=True)
class Bits:
    """Content of a tensor. ``values`` is for comparisons with a tolerance."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes
    values: Tensor = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.values.flatten()[:4].tolist()}"


class Picture:
    """Record ``seen[path, aspect]`` of every object that can be reached from ``roots``."""

    def __init__(self, **roots: Any) -> None:
        self.seen: dict[tuple[str, str], Any] = {}
        self._paths: dict[int, str] = {}
        self._alive: list[Any] = []  # alive objects have distinct ids
        self._queue: deque[tuple[str, Any]] = deque(roots.items())
        while self._queue:
            path, node = self._queue.popleft()
            self._visit(path, node)
        self._queue.clear()

    def _visit(self, path: str, node: Any) -> None:
        if isinstance(node, PLAIN):
            self.seen[path, "value"] = repr(node)
            return
        if id(node) in self._paths:
            self.seen[path, "same as"] = self._paths[id(node)]
            return
        self._paths[id(node)] = path
        self._alive.append(node)
        self.seen[path, "object"] = id(node)
        self.seen[path, "class"] = type(node)
        self.seen[path, "type"] = f"{type(node).__module__}.{type(node).__qualname__}"
        self._queue.extend((f"{path}{step}", child) for step, child in self._inside(path, node))

    def _inside(self, path: str, node: Any) -> Iterable[tuple[str, Any]]:
        """Record the value of ``node``, and return its children."""
        if isinstance(node, Tensor):
            return self._tensor(path, node)
        if isinstance(node, np.ndarray):
            self.seen[path, "bits"] = (node.shape, node.tobytes())
            return []
        state = _generator_state(node)
        if state is not None:
            self.seen[path, "bits"] = state
            return []
        if isinstance(node, weakref.ref):
            self.seen[path, "refers to"] = id(node())
            return []
        if isinstance(node, Mapping):
            # The ids of hooks increase over the whole process.
            named = "_hooks" not in path.rpartition(".")[2]
            keys = [key if named and isinstance(key, PLAIN) else f"#{i}" for i, key in enumerate(node)]
            self.seen[path, "keys"] = tuple(map(str, keys))
            attributes = [(f".{k}", v) for k, v in getattr(node, "__dict__", {}).items()]
            return [(f"[{key!r}]", value) for key, value in zip(keys, node.values(), strict=True)] + attributes
        if isinstance(node, (list, tuple, deque)):
            self.seen[path, "keys"] = len(node)
            return [(f"[{i}]", value) for i, value in enumerate(node)]
        if isinstance(node, (set, frozenset)):
            self.seen[path, "value"] = sorted(map(repr, node)) if all(isinstance(v, PLAIN) for v in node) else len(node)
            return []
        return self._object(path, node)

    def _tensor(self, path: str, node: Tensor) -> Iterable[tuple[str, Any]]:
        self.seen[path, "bits"] = _bits(node)
        layout: tuple[Any, ...] = (node.dtype, node.device, node.requires_grad, node.is_leaf)
        if node.layout is torch.strided:
            self.seen[path, "memory"] = node.data_ptr()
            layout += node.stride(), node.storage_offset()
        self.seen[path, "layout"] = layout
        children = [(f".{name}", value) for name, value in getattr(node, "__dict__", {}).items()]
        if node.is_leaf:
            children.append((".grad", node.grad))
        return [*children, ("._backward_hooks", node._backward_hooks or None)]

    def _object(self, path: str, node: Any) -> Iterable[tuple[str, Any]]:
        if isinstance(node, OPAQUE):
            return []
        if isinstance(node, functools.partial):
            return [(".func", node.func), (".args", node.args), (".keywords", node.keywords)]
        if isinstance(node, types.MethodType):
            return [(".__func__", node.__func__), (".__self__", node.__self__)]
        attributes = dict(getattr(node, "__dict__", {}))
        for name in (name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())):
            if isinstance(name, str) and hasattr(node, name) and name not in ("__weakref__", "__dict__"):
                attributes[name] = getattr(node, name)
        attributes = {k: v for k, v in attributes.items() if not k.startswith(THEIRS)}
        self.seen[path, "keys"] = tuple(sorted(attributes))
        if isinstance(node, types.FunctionType):
            attributes["__defaults__"], attributes["__kwdefaults__"] = node.__defaults__, node.__kwdefaults__
            for i, cell in enumerate(node.__closure__ or ()):
                attributes[f"<cell {node.__code__.co_freevars[i]}>"] = _cell_contents(cell)
        return [(f".{name}", value) for name, value in attributes.items()]

    def changes(
        self, other: Picture, aspects: frozenset[str] | None = None, equal: Callable[[Any, Any], bool] = operator.eq
    ) -> list[str]:
        """Return the places where ``other`` differs.

        Args:
            other: a later picture of the same roots.
            aspects: the aspects to compare. None compares all aspects, and reports what is new in ``other``.
            equal: compares two values.
        """
        here = {key: value for key, value in self.seen.items() if aspects is None or key[1] in aspects}
        new = other.seen.keys() - here.keys() if aspects is None else ()
        return [
            f"{path} ({aspect}): {value!r:.100} -> {other.seen.get((path, aspect), 'gone')!r:.100}"
            for (path, aspect), value in here.items()
            if (path, aspect) not in other.seen or not equal(value, other.seen[path, aspect])
        ] + [f"{path} ({aspect}) is new: {other.seen[path, aspect]!r:.100}" for path, aspect in new]


def _bits(tensor: Tensor) -> Bits:
    with torch.no_grad():
        dense = tensor.detach()
        dense = dense.to_dense() if dense.is_sparse else dense
        dense = dense.cpu().resolve_conj().resolve_neg().contiguous().clone()
    digest = hashlib.blake2b(dense.flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
    return Bits(tensor.dtype, tuple(tensor.shape), digest, dense)


def _generator_state(node: Any) -> Any:
    if isinstance(node, torch.Generator):
        return node.get_state().numpy().tobytes()
    if isinstance(node, np.random.Generator):
        return str(node.bit_generator.state)
    if isinstance(node, np.random.RandomState):
        return str(node.get_state())
    return node.getstate() if isinstance(node, random.Random) else None


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"

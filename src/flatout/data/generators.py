"""Every random generator that a dataset can be seen to use: capture, compare, restore."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_DEPTH = 8  # attributes of attributes of ...
_NODES = 20_000  # looked at in all, the nearest first: annotations go on and on
_WIDTH = 64  # elements looked at in one container: transforms are few, file names many


@dataclass(frozen=True)
class _Tracked:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    state: Any


class RandomState:
    """States of the generators of torch, ``random`` and NumPy, and of those reachable from an object."""

    def __init__(self, tracked: list[_Tracked]) -> None:
        self._tracked = tracked

    @classmethod
    def only(cls, generators: Sequence[Any]) -> RandomState:
        """Read ``generators`` and no other."""
        return cls([_track_found(generator) for generator in generators])

    @classmethod
    def capture(cls, root: Any = None) -> RandomState:
        """Read the global generators, and those in attributes, containers and closures below ``root``."""
        return cls.of(generators_in(root))

    @classmethod
    def of(cls, generators: Sequence[Any]) -> RandomState:
        """Read the global generators and ``generators``."""
        tracked = [
            _track("torch's default generator", torch.get_rng_state, torch.set_rng_state),
            _track("Python's random", random.getstate, random.setstate),
            _track("NumPy's global generator", np.random.get_state, np.random.set_state),
        ]
        if torch.cuda.is_initialized():
            tracked.append(_track("a CUDA generator", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
        tracked += [_track_found(generator) for generator in generators]
        return cls(tracked)

    def reread(self) -> RandomState:
        """The same generators, as they are now."""
        return RandomState([_track(each.name, each.read, each.write) for each in self._tracked])

    def moved(self) -> str | None:
        """Name of the first generator whose state has changed since; ``None`` if all are as they were."""
        return next((each.name for each in self._tracked if not _same(each.read(), each.state)), None)

    def restore(self) -> None:
        """Put every generator back."""
        for each in self._tracked:
            each.write(each.state)

    def states(self) -> list[tuple[str, Any]]:
        """Every generator's name and state, of tensors, numbers and strings alone."""
        return [(each.name, _portable(each.state)) for each in self._tracked]

    def write(self, states: Sequence[tuple[str, Any]]) -> None:
        """Give the generators the ``states`` that those of the same names once had; one without any stays."""
        left = list(states)
        for each in self._tracked:
            found = next((i for i, (name, _) in enumerate(left) if name == each.name), None)
            if found is not None:
                each.write(_like(left.pop(found)[1], each.state))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put every generator back at the end, whatever happens inside."""
        try:
            yield
        finally:
            self.restore()


def _track(name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> _Tracked:
    return _Tracked(name, read, write, read())


def _track_found(generator: Any) -> _Tracked:
    name = f"a {type(generator).__module__}.{type(generator).__name__} of the dataset"
    if isinstance(generator, torch.Generator):
        return _track(name, generator.get_state, generator.set_state)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return _track(name, lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(generator, np.random.RandomState):
        return _track(name, generator.get_state, generator.set_state)
    return _track(name, generator.getstate, generator.setstate)


def generators_in(root: Any) -> list[Any]:
    """The generators in attributes, containers and closures below ``root``."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    found: list[Any] = []
    level, seen = [root], {id(root)}
    for _ in range(_DEPTH):
        found += [node for node in level if issubclass(type(node), kinds)]  # a dead reference has a type
        below: list[Any] = []
        for node in level:
            for child in _children(node):
                if id(child) not in seen and len(seen) < _NODES:
                    seen.add(id(child))
                    below.append(child)
        level = below
    return found


def _children(node: Any) -> list[Any]:
    try:
        return _looked_into(node)
    except Exception:  # a closed file, a dead reference: what cannot be looked into cannot be used either
        return []


def _looked_into(node: Any) -> list[Any]:
    if isinstance(node, (str, bytes, int, float, torch.Tensor, np.ndarray, type, types.ModuleType)):
        return []
    if isinstance(node, types.MethodType):
        return [node.__self__, node.__func__]
    if isinstance(node, types.FunctionType):
        return _of_function(node)
    if isinstance(node, functools.partial):
        return [node.func, *node.args, *node.keywords.values()]
    if isinstance(node, dict):
        return list(itertools.islice(node.values(), _WIDTH))
    if isinstance(node, (list, tuple)):
        return list(node[:_WIDTH])
    methods = (getattr(type(node), name, None) for name in ("__getitem__", "__getitems__", "__call__", "__iter__"))
    own = [method for method in methods if isinstance(method, types.FunctionType)]
    return [*getattr(node, "__dict__", {}).values(), *own]


def _of_function(function: types.FunctionType) -> list[Any]:
    """What it can use: what is bound to it, and the globals that it names."""
    bound = [_cell_contents(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    named = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    # Of functions, only those beside this one: a library's may use anything.
    here = function.__module__
    return (
        bound
        + defaults
        + [found for found in named if not isinstance(found, types.FunctionType) or found.__module__ == here]
    )


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _portable(state: Any) -> Any:
    """``state`` with tensors for arrays, as ``torch.load`` takes it without further ado."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, dict):
        return {key: _portable(value) for key, value in state.items()}
    return type(state)(map(_portable, state)) if isinstance(state, (list, tuple)) else state


def _like(state: Any, model: Any) -> Any:
    """``state`` with arrays for tensors wherever ``model`` has arrays."""
    if isinstance(model, np.ndarray):
        return np.asarray(state)
    if isinstance(model, dict):
        return {key: _like(state[key], value) for key, value in model.items()}
    return type(model)(map(_like, state, model)) if isinstance(model, (list, tuple)) else state


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        with contextlib.suppress(ValueError, RuntimeError):  # numbers alone: many times faster than one by one
            return bool(left == right)
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right

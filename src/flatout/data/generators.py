"""Every random generator that a dataset can be seen to use: capture, compare, restore."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from flatout._cleanup import run_all
from flatout._reach import reachable


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
        run_all(partial(each.write, each.state) for each in self._tracked)

    def advance(self, later: RandomState) -> None:
        """Give each generator that is still as it was here the state that it has in ``later``, a ``reread``."""
        for here, there in zip(self._tracked, later._tracked, strict=True):
            if not _same(here.state, there.state) and _same(here.read(), here.state):
                here.write(there.state)

    def states(self) -> list[tuple[str, Any]]:
        """Every generator's name and state, of tensors, numbers and strings alone."""
        return [(each.name, _portable(each.state)) for each in self._tracked]

    def write(self, states: Sequence[tuple[str, Any]]) -> None:
        """Give the generators the ``states`` that those of the same names once had; one without any stays.

        Raises:
            Exception: of many kinds; a state does not fit. All generators are as they were read, then.
        """
        given = self.given(states)
        try:
            for each in given._tracked:
                each.write(each.state)
        except Exception:
            self.restore()
            raise

    def given(self, states: Sequence[tuple[str, Any]]) -> RandomState:
        """The generators of these names, with the ``states`` that those of the same names once had."""
        left, tracked = list(states), []
        for each in self._tracked:
            found = next((i for i, (name, _) in enumerate(left) if name == each.name), None)
            if found is not None:
                tracked.append(replace(each, state=_like(left.pop(found)[1], each.state)))
        return RandomState(tracked)

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
    found = (node for node in reachable(root) if issubclass(type(node), kinds))  # a dead reference has a type
    return [generator for generator in found if not isinstance(generator, random.SystemRandom)]  # it has no state


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

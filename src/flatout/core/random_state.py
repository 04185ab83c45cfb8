"""Capture, comparison and restoring of the states of all random generators that a dataset can reach."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from flatout.core.errors import run_all
from flatout.core.reachable import reachable
from flatout.core.saved import Saved

_OF_TORCH = ("torch's ", "a CUDA ", "a torch.")
"""Beginnings of the names of torch's generators."""


class RandomState:
    """States of the global random generators of torch, Python and NumPy, and of generators that an object holds."""

    def __init__(self, tracked: list[Saved]) -> None:
        self._tracked = tracked

    @classmethod
    def only(cls, generators: Sequence[Any]) -> RandomState:
        """Read ``generators`` only, not the global ones."""
        return cls([_track_found(generator) for generator in generators])

    @classmethod
    def capture(cls, root: Any = None) -> RandomState:
        """Read the global generators, and all generators that :func:`generators_in` finds in ``root``."""
        return cls.of(generators_in(root))

    @classmethod
    def of(cls, generators: Sequence[Any]) -> RandomState:
        """Read the global generators and ``generators``."""
        tracked = cls.of_host()._tracked
        if torch.cuda.is_initialized():
            tracked.append(_track("a CUDA generator", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
        tracked += [_track_found(generator) for generator in generators]
        return cls(tracked)

    @classmethod
    def of_torch(cls, generators: Sequence[Any]) -> RandomState:
        """Read torch's default generator and ``generators``."""
        default = _track("torch's default generator", torch.get_rng_state, torch.set_rng_state)
        return cls([default, *map(_track_found, generators)])

    @classmethod
    def of_host(cls) -> RandomState:
        """Read the global generators of the CPU."""
        return cls(
            [
                _track("torch's default generator", torch.get_rng_state, torch.set_rng_state),
                _track("Python's random", random.getstate, random.setstate),
                _track("NumPy's global generator", np.random.get_state, np.random.set_state),
            ]
        )

    def reread(self) -> RandomState:
        """Return the current states of the same generators."""
        return RandomState([_track(each.what, each.read, each.write) for each in self._tracked])

    def moved(self, *, of_torch: bool = True) -> str | None:
        """Return the name of the first generator whose state has changed, or None if no state has.

        Args:
            of_torch: False to leave out torch's generators.
        """
        names = (each.changed() for each in self._tracked if of_torch or not each.what.startswith(_OF_TORCH))
        return next(filter(None, names), None)

    def restore(self) -> None:
        """Restore the state of every generator."""
        run_all(partial(each.write, each.value) for each in self._tracked)

    def advance(self, later: RandomState) -> None:
        """Set each generator that still has the state read here to its state in ``later``.

        Args:
            later: a ``reread`` of this object.
        """
        for here, there in zip(self._tracked, later._tracked, strict=True):
            if not _same(here.value, there.value) and not here.changed():
                here.write(there.value)

    def states(self) -> list[tuple[str, Any]]:
        """Return the name and state of every generator, made of tensors, numbers and strings."""
        return [(each.what, _portable(each.value)) for each in self._tracked]

    def write(self, states: Sequence[tuple[str, Any]]) -> None:
        """Set the generators to ``states``, matched by name. A generator without a state is not changed.

        Raises:
            Exception: a state does not fit its generator. All generators are then restored to the states read here.
        """
        given = self.given(states)
        try:
            for each in given._tracked:
                each.write(each.value)
        except Exception:
            self.restore()
            raise

    def given(self, states: Sequence[tuple[str, Any]]) -> RandomState:
        """Return the generators that have an entry in ``states``, with the states of these entries."""
        left, tracked = list(states), []
        for each in self._tracked:
            found = next((i for i, (name, _) in enumerate(left) if name == each.what), None)
            if found is not None:
                tracked.append(_track(each.what, each.read, each.write))
                tracked[-1].value = _like(left.pop(found)[1], each.value)
        return RandomState(tracked)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore every generator at the end of the block, even after an exception."""
        try:
            yield
        finally:
            self.restore()


def _track(name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> Saved:
    return Saved(read, write, _same, name)


def _track_found(generator: Any) -> Saved:
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
    """Return the generators in attributes, containers and closures reachable from ``root``."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    found = (node for node in reachable(root) if issubclass(type(node), kinds))  # isinstance raises for a dead proxy
    return [generator for generator in found if not isinstance(generator, random.SystemRandom)]  # it has no state


def _portable(state: Any) -> Any:
    """Return ``state`` with arrays replaced by tensors, which ``torch.load`` accepts with ``weights_only``."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, dict):
        return {key: _portable(value) for key, value in state.items()}
    return type(state)(map(_portable, state)) if isinstance(state, (list, tuple)) else state


def _like(state: Any, model: Any) -> Any:
    """Return ``state`` with tensors replaced by arrays where ``model`` has arrays."""
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
        with contextlib.suppress(ValueError, RuntimeError):  # for numbers: many times faster than one by one
            return bool(left == right)
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right

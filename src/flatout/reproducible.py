"""Training that repeats bit for bit: seeds, deterministic algorithms, and the settings that libraries read once."""

from __future__ import annotations

import os
import random
import warnings
import weakref
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from flatout.data.generators import RandomState

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_CONFIGS = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS repeats its results; the first is faster and takes 24 MiB (cuBLAS documentation,
"Results reproducibility")."""


_Flags = tuple[bool, bool, bool, bool, bool]
_holders: list[weakref.ref[DeterministicAlgorithms]] = []
"""Those that are on, the latest last. A run that is dropped without ``undo`` holds nothing any more."""
_in_force = 0  # how many `Reproducible` are


class DeterministicAlgorithms:
    """torch's deterministic algorithms with what they need around them, process-wide: on, and exactly off again.

    Several may be on at a time, and are turned off in any order: one that is not the latest leaves the settings to the
    next, which puts back what it found and what that one found.

    Args:
        warn_only: an operator without a deterministic algorithm warns; otherwise it raises.
    """

    def __init__(self, *, warn_only: bool = False) -> None:
        self._warn_only = warn_only
        self._before: tuple[_Flags, str | None] = _flags(), os.environ.get(CUBLAS)

    def enable(self) -> None:
        """Turn them on.

        Raises:
            RuntimeError: cuBLAS has started in this process, without a workspace that makes it repeat its results;
                nothing has changed then. A warning with ``warn_only``.
        """
        self._before = _flags(), os.environ.get(CUBLAS)
        _holders.append(weakref.ref(self))
        if os.environ.get(CUBLAS) not in CUBLAS_CONFIGS:
            os.environ[CUBLAS] = CUBLAS_CONFIGS[0]
        _set_flags((False, True, True, self._warn_only, True))
        if cublas_started_without():
            message = (
                f"cuBLAS has started in this process without {CUBLAS}, so that its products need not repeat: ask for "
                f"determinism before the first matrix product on a GPU, or start Python with {CUBLAS}=:4096:8"
            )
            if not self._warn_only:
                self.disable()
                raise RuntimeError(message)
            warnings.warn(message, stacklevel=3)

    def disable(self) -> None:
        """Put every setting back, or leave that to one that was turned on later."""
        on = [holder for reference in _holders if (holder := reference()) is not None]
        later = on[on.index(self) + 1 :]
        _holders[:] = [weakref.ref(holder) for holder in on if holder is not self]
        if later:
            later[0]._before = self._before
            return
        flags, cublas = self._before
        _set_flags(flags)
        if cublas is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = cublas


def _flags() -> _Flags:
    return (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def _set_flags(flags: _Flags) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = flags[:2]
    torch.use_deterministic_algorithms(flags[2], warn_only=flags[3])  # TorchInductor's own mode goes with it
    torch.utils.deterministic.fill_uninitialized_memory = flags[4]  # type: ignore[attr-defined]


def cublas_started_without() -> bool:
    """Whether torch says that cuBLAS runs with a workspace that may give other results from run to run.

    torch looks at the environment once, at the first product, and later releases bring a workspace of their own that
    needs none (pytorch #161749): only torch can tell, and a product of two numbers makes it.
    """
    if not torch.cuda.is_initialized():  # nor is cuBLAS
        return False
    number = torch.ones(1, 1, device="cuda")
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.mm(number, number)
    except RuntimeError as error:
        if CUBLAS in str(error):
            return True
        raise
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
    return False


def check_seed(seed: Any) -> None:
    """Refuse what torch cannot be seeded with.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: it is not in ``[0, 2**64)``.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")


def seed_all(seed: int) -> None:
    """Seed the global generators of python, numpy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Reproducible(AbstractContextManager["Reproducible"]):
    """What :func:`reproducible` returns: in force until ``undo()``, or until the ``with`` block that it heads ends."""

    def __init__(self, seed: int, *, warn_only: bool) -> None:
        check_seed(seed)
        self._seed = seed
        self._warn_only = warn_only
        self._before: tuple[RandomState, DeterministicAlgorithms] | None = None
        self._begin()

    def undo(self) -> None:
        """Put generators and settings back as they were; nothing happens when they are."""
        global _in_force
        if self._before is not None:
            random_state, algorithms = self._before
            self._before = None
            _in_force -= 1
            algorithms.disable()
            random_state.restore()

    def _begin(self) -> None:
        global _in_force
        if self._before is None:
            before = RandomState.capture(), DeterministicAlgorithms(warn_only=self._warn_only)
            seed_all(self._seed)
            try:
                before[1].enable()
            except BaseException:
                before[0].restore()
                raise
            self._before = before
            _in_force += 1

    def __enter__(self) -> Reproducible:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def is_reproducible() -> bool:
    """Return whether :func:`reproducible` is in force."""
    return _in_force > 0


def reproducible(seed: int, *, warn_only: bool = False) -> Reproducible:
    """Make everything from here on repeat bit for bit, on the same machine with the same software.

    ``flatout.reproducible(0)`` at the top of a script, before the model is made; or, for a part of it alone::

        with flatout.reproducible(0):
            ...

    It seeds the global generators of python, numpy and torch (every device), and has torch and its libraries choose
    algorithms that repeat: ``torch.use_deterministic_algorithms``, uninitialised memory filled, cuDNN deterministic
    and without benchmarks, cuBLAS with a workspace of its own per stream. A ``DataLoader`` draws the seeds of its
    workers, and of its shuffle, from what is seeded here: two runs with as many workers are alike without further ado;
    for random augmentation that is the same with any number of workers, see :func:`flatout.data.seed_samples`.

    It cannot reach generators that a program makes for itself, nor the order of sets of strings
    (``PYTHONHASHSEED``, which Python reads when it starts). Inside, ``optimize`` chooses as with
    ``deterministic=True``. ``optimize(deterministic=True, seed=...)`` does the same for a run, and says what it costs
    in speed.

    Args:
        seed: in ``[0, 2**64)``; numpy takes its lower 32 bits.
        warn_only: an operator that has no deterministic algorithm warns; by default it raises when it is called.

    Returns:
        A context manager, in force already; ``undo()`` ends it, too.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: ``seed`` is out of range.
        RuntimeError: it is too late: cuBLAS has started already, in a way that need not repeat. Nothing has changed.
    """
    return Reproducible(seed, warn_only=warn_only)

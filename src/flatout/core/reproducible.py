"""Seeds, deterministic algorithms and library settings for bit-reproducible training."""

from __future__ import annotations

import os
import random
import warnings
import weakref
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from flatout.core.random_state import RandomState

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_CONFIGS = (":4096:8", ":16:8")
"""Workspace settings that make cuBLAS results repeatable. The first is faster and takes 24 MiB.

Source: cuBLAS documentation, "Results reproducibility".
"""


_Flags = tuple[bool, bool, bool, bool, bool]
_holders: list[weakref.ref[DeterministicAlgorithms]] = []
"""Enabled objects, the latest last. References are weak, so a run that is dropped without ``undo`` disappears."""
_in_force = 0  # number of `Reproducible` objects in force


class DeterministicAlgorithms:
    """Process-wide switch for torch's deterministic algorithms and the settings that they need.

    Several objects may be enabled at a time and disabled in any order. An object that is disabled before a later one
    passes its saved settings to the next object. That object restores the settings when it is disabled.

    Args:
        warn_only: True if an operator without a deterministic algorithm warns instead of raising an error.
    """

    def __init__(self, *, warn_only: bool = False) -> None:
        self._warn_only = warn_only
        self._before: tuple[_Flags, str | None] = _flags(), os.environ.get(CUBLAS)

    def enable(self) -> None:
        """Turn deterministic algorithms on.

        Raises:
            RuntimeError: cuBLAS has started in this process without a deterministic workspace. Nothing has changed.
                With ``warn_only`` this is a warning.
        """
        self._before = _flags(), os.environ.get(CUBLAS)
        _holders.append(weakref.ref(self))
        if os.environ.get(CUBLAS) not in CUBLAS_CONFIGS:
            os.environ[CUBLAS] = CUBLAS_CONFIGS[0]
        _set_flags((False, True, True, self._warn_only, True))
        if cublas_started_without():
            message = (
                f"cuBLAS has started in this process without {CUBLAS}, so its results may vary from run to run. Ask "
                f"for determinism before the first matrix product on a GPU, or start Python with {CUBLAS}=:4096:8"
            )
            if not self._warn_only:
                self.disable()
                raise RuntimeError(message)
            warnings.warn(message, stacklevel=3)

    def disable(self) -> None:
        """Restore every setting. If another object was enabled later, that object restores the settings."""
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
    torch.use_deterministic_algorithms(flags[2], warn_only=flags[3])  # also sets TorchInductor's own mode
    torch.utils.deterministic.fill_uninitialized_memory = flags[4]  # type: ignore[attr-defined]


def cublas_started_without() -> bool:
    """Return True if torch reports that cuBLAS started without a deterministic workspace.

    torch reads the environment once, at the first product. Later releases allocate a workspace that needs no
    environment variable (pytorch #161749). So only torch knows, and torch checks at every product. For this check, the
    function multiplies two numbers.
    """
    if not torch.cuda.is_initialized():  # then cuBLAS has not started either
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
    """Reject a value that torch does not accept as a seed.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: ``seed`` is not in ``[0, 2**64)``.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Reproducible(AbstractContextManager["Reproducible"]):
    """Result of :func:`reproducible`, in force until ``undo()`` or the end of its ``with`` block."""

    def __init__(self, seed: int, *, warn_only: bool) -> None:
        check_seed(seed)
        self._seed = seed
        self._warn_only = warn_only
        self._before: tuple[RandomState, DeterministicAlgorithms] | None = None
        self._begin()

    def undo(self) -> None:
        """Restore generators and settings. Does nothing when called again."""
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
    """Return True if :func:`reproducible` is in force."""
    return _in_force > 0


def reproducible(seed: int, *, warn_only: bool = False) -> Reproducible:
    """Make everything after this call bit-reproducible, on the same machine with the same software.

    Call ``flatout.reproducible(0)`` at the top of a script, before the model is made. Or use it for a part only::

        with flatout.reproducible(0):
            ...

    The function seeds the global generators of Python, NumPy and torch (every device). It also makes torch and its
    libraries deterministic: ``torch.use_deterministic_algorithms``, filled uninitialized memory, deterministic cuDNN
    without benchmarks, and a fixed cuBLAS workspace per stream. A ``DataLoader`` draws the seeds of its workers and of
    its shuffle from these generators, so two runs with the same number of workers are equal. With
    :func:`flatout.data.seed_samples`, random augmentation is equal with any number of workers.

    Generators that a program makes itself are not seeded. The order of sets of strings is not fixed. It depends on
    ``PYTHONHASHSEED``, which Python reads when it starts. While ``reproducible`` is in force, ``optimize`` chooses
    techniques as with ``deterministic=True``. ``optimize(deterministic=True, seed=...)`` does the same for one run and
    reports the cost in speed.

    Args:
        seed: an int in ``[0, 2**64)``. NumPy takes its lower 32 bits.
        warn_only: True if an operator without a deterministic algorithm warns. By default it raises an error.

    Returns:
        A context manager that is already in force. ``undo()`` also ends it.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: ``seed`` is out of range.
        RuntimeError: cuBLAS has already started without a deterministic workspace. Nothing has changed.
    """
    return Reproducible(seed, warn_only=warn_only)

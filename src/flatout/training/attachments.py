"""Registry of the toggles that ``optimize`` has attached to each model, so that ``undo`` works without the ``Run``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from flatout.core.toggle import Toggle

_attached: weakref.WeakKeyDictionary[nn.Module, list[Toggle]] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, toggles: Sequence[Toggle]) -> None:
    """Turn toggles on in their order, and register them for ``detach``."""
    for toggle in toggles:
        toggle.enable()
    _attached[model] = list(toggles)


def detach(model: nn.Module) -> list[Toggle]:
    """Turn off and forget the toggles that are attached to a model. Return them in their order, for ``attach``."""
    toggles = _attached.pop(model, [])
    for toggle in reversed(toggles):
        toggle.disable()
        toggle.release()
    return toggles


def is_attached(model: nn.Module, toggles: Sequence[Toggle]) -> bool:
    """Return True if exactly these toggles are attached to a model."""
    return _attached.get(model) == list(toggles)

"""Registry of the techniques and the report of each tuned model.

With the registry, ``undo`` and ``report_of`` work without the ``Run``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatout.core.toggle import Toggle


@dataclass(frozen=True, eq=False)
class Attachment:
    """Result of a tuning that is attached to a model.

    Attributes:
        toggles: the techniques that are on, in the order in which they are turned on.
        report: returns the report on the tuning, or None if there is no report yet.
    """

    toggles: tuple[Toggle, ...]
    report: Callable[[], Any]


_attached: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()


def attach(model: nn.Module, attachment: Attachment) -> None:
    """Turn the toggles on, and register the attachment."""
    for toggle in attachment.toggles:
        toggle.enable()
    _attached[model] = attachment


def detach(model: nn.Module) -> Attachment | None:
    """Turn off the toggles of a model's attachment and remove it from the registry.

    Returns:
        The attachment, which ``attach`` accepts again. None if nothing is attached.
    """
    attachment = _attached.pop(model, None)
    if attachment is not None:
        for toggle in reversed(attachment.toggles):
            toggle.disable()
            toggle.release()
    return attachment


def attached_to(model: nn.Module) -> Attachment | None:
    """Return the attachment of a model, or None if nothing is attached."""
    return _attached.get(model)

"""Checks that the values of a state have the expected kinds, before the state is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch import Tensor


def check_kinds(state: Any, own: Any, where: str) -> None:
    """Reject values whose kind, or tensors whose shape, differs from the same entry of ``own``.

    None fits every kind. A number fits a tensor of one element, because optimizers and schedulers convert between
    numbers and such tensors. Entries that only one of the two states has are not checked.

    Args:
        state: tensors, numbers and strings, in lists, tuples and dicts.
        own: the current state of the same training.
        where: the name of ``state`` in errors.

    Raises:
        ValueError: an entry differs. The message names the first such entry.
    """
    kind, expected = _kind(state), _kind(own)
    if None in (kind, expected):
        return
    if kind != expected:
        raise ValueError(f"{where} must be {expected}, got {kind}")
    if isinstance(own, Mapping):
        for key in own.keys() & state.keys():
            check_kinds(state[key], own[key], f"{where}[{key!r}]")
    elif isinstance(own, (list, tuple)):
        if (isinstance(own, tuple) or isinstance(state, tuple)) and len(own) != len(state):
            raise ValueError(f"{where} must have {len(own)} entries, got {len(state)}")
        for i, (value, expected) in enumerate(zip(state, own, strict=False)):
            check_kinds(value, expected, f"{where}[{i}]")


def check_number(value: Any, where: str, least: int = 0) -> int:
    """Return ``value`` if it is an int of at least ``least``.

    Raises:
        ValueError: ``value`` is not such an int. The message calls it ``where``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where} must be an int >= {least}, got {value!r}")
    return value


def _kind(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return "a number" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    for kind, name in _KINDS.items():
        if isinstance(value, kind):
            return name
    return None if value is None else type(value).__name__


_KINDS: dict[type | tuple[type, ...], str] = {
    Number: "a number",
    str: "a string",
    Mapping: "a mapping",
    (list, tuple): "a sequence",
}

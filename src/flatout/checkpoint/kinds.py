"""A state that is to be loaded, checked against the one that is there before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch import Tensor


def check_kinds(state: Any, own: Any, where: str) -> None:
    """Refuse values of another kind, and tensors of another shape, than ``own`` has in the same place.

    None fits everything. A number fits a tensor of one element: optimizers and schedulers turn one into the other.
    What is in one of the two alone is not looked at.

    Args:
        state: of tensors, numbers, strings, and lists, tuples and dicts of them.
        own: a state of the same training as it is now.
        where: what ``state`` is called in errors.

    Raises:
        ValueError: names the first place that differs.
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
        if isinstance(own, tuple) and len(own) != len(state):
            raise ValueError(f"{where} must have {len(own)} entries, got {len(state)}")
        for i, (value, expected) in enumerate(zip(state, own, strict=False)):
            check_kinds(value, expected, f"{where}[{i}]")


def check_number(value: Any, where: str, least: int = 0) -> int:
    """Return a whole number of at least ``least``.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where} must be a number from {least}, got {value!r}")
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

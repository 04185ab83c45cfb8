"""Cleanup that continues past failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Call every action, then raise the first error of any.

    Raises:
        BaseException: the first that an action raised, with the later ones as its notes.
    """
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:  # an interrupt, too, must not leave half of the state restored
            if first is None:
                first = error
            else:
                add_note(first, f"also failed: {type(error).__name__}: {error}")
    if first is not None:
        raise first


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an error; Python 3.10 stores it and does not print it."""
    vars(error).setdefault("__notes__", []).append(note)

"""Cleanup that continues after failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Call every action, then raise the first error.

    Raises:
        BaseException: the first error of an action. Later errors are its notes.
    """
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:  # even an interrupt must not leave the state half restored
            if first is None:
                first = error
            else:
                add_note(first, f"also failed: {type(error).__name__}: {error}")
    if first is not None:
        raise first


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an error. Python 3.10 stores the note but does not print it."""
    vars(error).setdefault("__notes__", []).append(note)

"""Candidates: ways to run a step, or to load batches, that a trial can turn on and off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from flatout.core.toggle import Toggle


class Candidate(Toggle):
    """Way to run a step that a trial turns on and off. As a context manager, it is on inside the block.

    After a candidate is turned on and off, model, optimizer and flags are exactly as before.

    Attributes:
        value: the value with which ``techniques={name: value}`` forces this candidate. A plan stores this value.
        failure: reason why the candidate has stopped working while it was on; empty while it works.
        steps_to_record: steps that each batch needs after a restore of state before the candidate replays again. 0 for
            candidates that do not record steps.
        steps_to_switch: untimed steps that the candidate needs after it is turned on to reach its full speed.
        resizes: True if the candidate changes the number of samples that are computed at once.
        scale: samples of a step, relative to a step without the candidate.
    """

    value: Any
    failure: str = ""
    steps_to_record: int = 0
    steps_to_switch: int = 0
    resizes: bool = False
    scale: float = 1.0

    def __enter__(self) -> None:
        self.enable()

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def end_warmup(self) -> None:
        """Finish the warm-up, after one step on every shape of the trial's batches."""

    def on_tuning_end(self) -> None:
        """Free memory that only trials require. The tuner calls this after all trials."""


class ChangeCandidate(Candidate):
    """Candidate of a function that makes a change, such as of a process-wide flag or of a module's class.

    Args:
        label: name in the report.
        value: see ``Candidate``.
        change: makes the change, and returns the function that reverts it. Neither must keep the model alive.
    """

    def __init__(self, label: str, value: Any, change: Callable[[], Callable[[], object]]) -> None:
        self.label, self.value = label, value
        self._change = change
        self._revert: Callable[[], object] | None = None

    def _turn_on(self) -> None:
        self._revert = self._change()

    def _turn_off(self) -> None:
        revert, self._revert = self._revert, None
        assert revert is not None
        revert()


class PairCandidate(Candidate):
    """Pair of candidates that are on together or not at all.

    Args:
        first: turned on first, and off last.
        second: a candidate of a companion technique.
        label: name in the report.
    """

    def __init__(self, first: Candidate, second: Candidate, label: str) -> None:
        self.label = label
        self.value = (first.value, second.value)
        self.parts = (first, second)
        # Turning off one part drops the recorded steps of the other, so each switch records again.
        self.steps_to_record = self.steps_to_switch = max(part.steps_to_record for part in self.parts)

    @property
    def failure(self) -> str:  # type: ignore[override]
        """Reason why one of the two has stopped working; empty while both work."""
        return self.parts[0].failure or self.parts[1].failure

    def _turn_on(self) -> None:
        first, second = self.parts
        first.enable()
        try:
            second.enable()
        except BaseException:
            first.disable()
            raise

    def _turn_off(self) -> None:
        for part in reversed(self.parts):
            part.disable()

    def end_warmup(self) -> None:
        """End the warm-up of both candidates."""
        for part in self.parts:
            part.end_warmup()

    def release(self) -> None:
        """Release both candidates."""
        for part in self.parts:
            part.release()


class LoaderCandidate(Protocol):
    """Loader with the same batches as the user's, made on demand. See ``Candidate`` for ``label`` and ``value``."""

    label: str
    value: Any

    def make(self) -> Iterable[Any]:
        """Build the loader."""

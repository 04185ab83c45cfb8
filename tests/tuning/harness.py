"""Candidates and trials for tests of the tuner's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.report import Gain, Trial
from flatout.techniques import Candidate, StepTechnique
from flatout.training.job import Job


class Change(Candidate):
    """Candidate that two functions enable and disable."""

    def __init__(self, label: str, on: Callable[[], object], off: Callable[[], object]) -> None:
        self.label = self.value = label
        self._on, self._off = on, off

    def _turn_on(self) -> None:
        self._on()

    def _turn_off(self) -> None:
        self._off()


class OneCandidate(StepTechnique):
    """Technique with one candidate, whose numerics are checked. Subclasses define ``change``."""

    name = "candidate"
    title = "a candidate"
    rationale = "it is fast"
    expected = "2x"

    def change(self, job: Job) -> Candidate:
        """Return the candidate."""
        raise NotImplementedError

    def candidates(self, job: Job) -> Sequence[Candidate]:
        return [self.change(job)]


def trial(
    gain: Gain | None, before: int | None = 200, after: int | None = 200, *, pairs: int = 6, failure: str = ""
) -> Trial:
    """Return a trial of a candidate whose steps take ``after`` MiB instead of ``before``."""
    ms = 0.0 if gain is None else 1000 / gain.ratio
    old, new = (None if mebibytes is None else mebibytes * 2**20 for mebibytes in (before, after))
    return Trial("x", 1000.0, ms, gain, pairs, baseline_bytes=old, candidate_bytes=new, failure=failure)

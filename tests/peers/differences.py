"""The tests that fail with flatout's classes, and the reason of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Tests of a suite that fail for one reason.

    Attributes:
        suite: name of the suite; ``*`` is any.
        test: pattern of pytest's node ids, as in ``fnmatch``.
        reason: one sentence.
    """

    suite: str
    test: str
    reason: str


DIFFERENCES: tuple[Difference, ...] = ()

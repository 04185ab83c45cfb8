"""Tests that fail with flatout's classes, and the reason of each failure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Tests of a suite that fail for one reason.

    Attributes:
        suite: name of the suite.
        test: pattern of pytest's node ids, as in ``fnmatch``.
        reason: one sentence.
    """

    suite: str
    test: str
    reason: str


DIFFERENCES = (
    *(
        Difference(
            "torch, optimizers",
            f"*::TestDifferentiableOptimizer::test_{name}",
            "`differentiable=True` is refused: autograd does not record the native step",
        )
        for name in ("adam", "adamw", "sgd")
    ),
    Difference(
        "torch, DataLoader in a Prefetcher",
        "*::test_segfault",
        "the `RuntimeError` for a worker that died has another text: the worker's number, and the name of the signal",
    ),
)

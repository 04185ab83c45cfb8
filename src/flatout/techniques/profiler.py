"""7: the profiler."""

from __future__ import annotations

from flatout.techniques.base import Rule


class Profiler(Rule):
    """Every step names its parts (loader, copy, forward, backward, update) to whatever profiler listens.

    When it helps: a profile without them shows thousands of operators, and not which part of the step they belong to.
    When it hurts: never while nobody listens; a profile slows the steps that it covers, so it is made on request.
    """

    name = "profiler"
    number = 7
    title = "profiler"
    rationale = (
        "the parts of a step are named for torch.profiler and Nsight; run.profile() shows on request where its time "
        "goes"
    )
    exact = True

"""Additional technique: DDP's search of the graph for parameters without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.techniques.base import Effect, NotApplicable, StepTechnique
from flatout.techniques.candidate import Candidate
from flatout.techniques.reducer_options import check_reducer, reducer_candidate

if TYPE_CHECKING:
    from flatout.training.job import Job


class StaticGraph(StepTechnique):
    """Lets DDP search the graph for parameters without gradients in the first step alone.

    When it helps: some parameters get no gradient, so that DDP walks through the graph of every step, and never sorts
    its buckets. When it hurts: never by much. If other parameters get gradients in a later step, that step is repeated,
    and DDP searches the graph again from there on.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
    """

    name = "static_graph"
    title = "static graph"
    expected = "one search per run instead of per step"
    rationale = "the same parameters get gradients in every step, so DDP searches no graph"
    keeps_cpu_time = False
    saves_communication = True

    def check(self, job: Job) -> None:
        """Require parameters without gradients."""
        check_reducer(job)
        sync = job.stepper.sync
        if sync is not None and not sync.finds_unused:
            raise NotApplicable("every parameter gets a gradient, so DDP searches no graph")

    def effect_on(self, job: Job) -> Effect:
        """Return "exact" for two ranks, because a sum of two gradients has only one order."""
        return "exact" if job.spec.ranks.size == 2 else self.effect

    def candidates(self, job: Job) -> Sequence[Candidate]:
        """Return the only candidate."""
        return [reducer_candidate(job, "on", True, static_graph=True)]

"""Verification of a candidate's numerics against the baseline's. The times of its updates are used, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from flatout.distributed.agreement import Agreement
from flatout.techniques import Candidate, StepTechnique
from flatout.tuning.bench import Bench
from flatout.tuning.equivalence import (
    FEWEST_UPDATES,
    LEEWAY,
    UPDATES,
    Difference,
    Observed,
    compare,
    nudge,
    observe,
    updates_have_gradients,
)
from flatout.tuning.noise import Pair
from flatout.tuning.same_draws import SameDraws


@dataclass(frozen=True)
class Verification:
    """Result of a verification.

    Attributes:
        differences: differences of outputs, gradients and losses. Empty if the candidate was too slow to finish, or if
            the job has nothing to compare.
        pair: the last update without and with the candidate; None without updates.
        broken: assumption of a technique that the steps so far contradict; empty if there is none.
    """

    differences: list[Difference]
    pair: Pair | None
    broken: str = ""

    @property
    def failure(self) -> str:
        """Text about the broken assumption, or about differences above their limits; empty if there are none."""
        return self.broken or "; ".join(str(difference) for difference in self.differences if difference.fails)


def is_verified(candidate: Candidate, techniques: Sequence[StepTechnique]) -> bool:
    """Return True if a candidate's numerics are compared. Steps with another number of samples have other outputs."""
    return any(technique.is_verified for technique in techniques) and candidate.scale == 1.0


def verify(
    bench: Bench, candidate: Candidate, techniques: Sequence[StepTechnique], limit: float = math.inf
) -> Verification:
    """Compare a candidate's outputs, gradients and losses with the baseline's.

    Args:
        bench: the training.
        candidate: a candidate of one technique, or of several.
        techniques: the techniques of the candidate. The checks of all of them apply.
        limit: seconds of an update with the candidate after which the comparison ends without a result.
    """
    if not is_verified(candidate, techniques):
        return Verification([], None)
    job, ranks, evaluation = bench.job, bench.ranks, any(t.checks_evaluation for t in techniques)
    batches = job.data.batches[: job.spec.accumulate] if bench.is_long else job.data.batches
    updates = FEWEST_UPDATES if bench.is_long else UPDATES
    draws_other_numbers = any(t.effect_on(job) == "reseeded" for t in techniques)
    changes_activations = draws_other_numbers and any(t.changes_activations for t in techniques)
    bench.rewind()
    reads_updates = updates_have_gradients(job)
    with candidate:
        reads_updates = reads_updates and updates_have_gradients(job)

    def seen(draws: SameDraws | None = None, limit: float = math.inf) -> Observed:
        with draws or (SameDraws() if changes_activations else nullcontext()):
            return observe(
                job, batches, evaluation=evaluation, updates=updates, reads_updates=reads_updates, limit=limit
            )

    baseline = bench.baseline_results((evaluation, changes_activations, reads_updates), seen)
    draws = SameDraws() if changes_activations else None
    bench.rewind()
    with candidate:
        observed = seen(draws, limit)
    pair = (baseline.blocks[-1], observed.blocks[-1]) if baseline.blocks else None
    if len(observed.blocks) < len(baseline.blocks):
        return Verification([], pair)
    found = _largest(ranks, compare(baseline, observed))
    if any(d.fails for d in found if d.what != "losses"):
        bench.rewind()
        nudge(job.spec.model, observed.dtype)
        nudged = _largest(ranks, compare(baseline, seen()))
        found = [d if d.what == "losses" else _allow(d, LEEWAY * n.by) for d, n in zip(found, nudged, strict=True)]
    drew_the_same = draws is not None and ranks.all_hold(draws.drew)
    if draws_other_numbers and not drew_the_same and any(d.fails for d in found):
        bench.rewind()
        torch.manual_seed(torch.initial_seed() + 1)
        redrawn = _largest(ranks, compare(baseline, seen()))
        found = [_allow(d, 2 * r.by) for d, r in zip(found, redrawn, strict=True)]
    return Verification(found, pair, _broken(bench, techniques))


def _broken(bench: Bench, techniques: Sequence[StepTechnique]) -> str:
    """Return the first assumption of some techniques that the steps of all ranks so far contradict."""
    guards = [guard for technique in techniques for guard in technique.assumes if guard.is_observed]
    seen = [guard.reason(found) for guard in guards if (found := guard.contradiction(bench.job))]
    return next((reason for of_rank in bench.ranks.every(seen) for reason in of_rank), "") if guards else ""


def _largest(ranks: Agreement, found: list[Difference]) -> list[Difference]:
    """Return each difference on the rank where it is largest."""
    return [replace(d, by=by) for d, by in zip(found, ranks.largest([d.by for d in found]), strict=True)]


def _allow(difference: Difference, much: float) -> Difference:
    return replace(difference, allowed=max(difference.allowed, much))

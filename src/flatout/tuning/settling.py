"""Settling of the hidden DDP: steps in which a new DDP puts its buckets in the order of the gradients."""

from __future__ import annotations

from dataclasses import replace

from flatout.core.out_of_memory import ran_out_of_memory
from flatout.tuning.bench import Bench


def settle(bench: Bench) -> None:
    """Choose where gradients are kept, and run steps.

    DDP learns in these steps the order of the gradients, and whether some gradients are missing. With more than two
    ranks, the order changes the rounding of sums. Without these steps, a resumed training would therefore differ in its
    first update. Out-of-memory errors are ignored, because later stages find parts of batches that fit.
    """
    job, sync = bench.job, bench.job.stepper.sync
    if sync is None:
        return
    # Gradients in the buckets save a copy of each gradient. A user's own loop may keep gradients longer than a step.
    sync.options = replace(sync.options, gradient_as_bucket_view=not job.why_no_step)
    try:
        with bench.ranks.attempt():
            for _ in range(max(1, job.stepper.steps_to_settle - 1)):  # the next step begins with the new buckets
                job.stepper.step(job.data.batches[0])
    except RuntimeError as error:
        if not (sync.allow_unused(error) or ran_out_of_memory(error)):
            raise
    bench.rewind()


def refresh(bench: Bench) -> None:
    """Make a new DDP if the decisions have changed its options or the memory format, and settle it."""
    stepper = bench.job.stepper
    if stepper.sync is not None and (stepper.sync.refresh() or stepper.steps_to_settle > 1):
        settle(bench)

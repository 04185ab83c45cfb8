"""Settling of the hidden DDP: buckets in the order of the gradients, after decisions that require a new DDP."""

from __future__ import annotations

from dataclasses import replace

from flatout.core.out_of_memory import ran_out_of_memory
from flatout.tuning.bench import Bench


def settle(bench: Bench) -> None:
    """Choose where gradients are kept, and take steps, by which DDP learns their order, and whether some are missing.

    With more than two ranks the order changes the rounding of sums. So without these steps, a resumed training would
    differ in its first update. A step that runs out of memory is left out, because later stages find parts of batches
    that fit.
    """
    job, sync = bench.job, bench.job.stepper.sync
    if sync is None:
        return
    # This saves a copy of each gradient. A loop of the user's own may keep gradients longer than a step.
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

"""Buckets of the hidden DDP, adapted to the model's gradients and to the decisions."""

from __future__ import annotations

from flatout.core.out_of_memory import ran_out_of_memory
from flatout.tuning.bench import Bench


def settle(bench: Bench) -> None:
    """Take a step, by which DDP learns the order of the gradients, and whether some parameters get none.

    With more than two ranks the order changes the rounding of sums. So without this step, a resumed training would
    differ in its first update. A step that runs out of memory is left out, because later stages find parts of batches
    that fit.
    """
    job = bench.job
    if job.stepper.sync is None:
        return
    try:
        with bench.ranks.attempt():
            job.stepper.step(job.data.batches[0])
    except RuntimeError as error:
        if not (job.stepper.sync.allow_unused(error) or ran_out_of_memory(error)):
            raise
    bench.rewind()


def refresh(bench: Bench) -> None:
    """Adapt DDP to the memory format that was decided."""
    sync = bench.job.stepper.sync
    if sync is not None and sync.refresh():
        settle(bench)

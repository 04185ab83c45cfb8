"""First steps with a technique that the user has forced. They show whether the technique works."""

from __future__ import annotations

from flatout.core import formatting
from flatout.core.errors import Unsuitable
from flatout.core.out_of_memory import ran_out_of_memory
from flatout.techniques import Candidate, NotApplicable
from flatout.tuning.bench import Bench
from flatout.tuning.lockstep import failure_of
from flatout.tuning.trial_runner import warm_up


def warm_up_forced(bench: Bench, candidate: Candidate) -> None:
    """Run a batch of each shape with a forced candidate.

    Raises:
        Unsuitable: steps fail with the candidate, or the candidate has fallen back to plain steps.
        Exception: steps also fail without the candidate.
    """
    try:
        with bench.ranks.attempt():
            warm_up(bench, candidate)
    except (NotApplicable, Unsuitable):
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise Unsuitable(f"it ran out of memory: {formatting.first_line(error)}") from error
        bench.rewind()
        for batch in bench.job.data.batches:
            bench.job.stepper.step(batch)
        raise Unsuitable(formatting.first_line(error)) from error
    failure = failure_of(bench.ranks, candidate)
    if failure:
        raise Unsuitable(failure)

"""Claim: the batch size that flatout finds trains within 5 % of the best that an exhaustive scan of all sizes finds.

    python -m pytest benchmarks/batch_size.py -s --benchmark-json=benchmarks/results/batch_size.json

Three models, each started from a small batch and from a large one, with memory for a few times the larger, as
``optimize(memory_limit=...)`` has it. The finder takes its trial steps; then every size on a grid of half an octave
that fits, and the largest that does, take turns with the chosen one, and the fastest of them once more, for longer.
Goals: 0.95 of the best, in fewer than 20 steps, with memory running out once at the most.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.loops import tuned
from support.training_jobs import JOBS
from support.turns import Lane, fastest, ratio, take_turns

from flatout.data import resized
from flatout.training.job import Job
from flatout.tuning.size_trials import SizeTrials

SMALLEST = 8
LARGEST = 4096
HOLDS = 4
"""Times the job's own batch that memory holds."""

STARTS = {"small": 0.125, "own": 1.0}
"""Batches to start from, relative to the job's own."""

ROUNDS, TURN = 4, 0.25
LAST, LAST_ROUNDS, LAST_TURN = 3, 10, 0.4
"""How many of the fastest are timed again: the best of many is partly the luckiest."""


def stepped(job: Job, samples: int) -> Iterator[int]:
    """Steps of so many samples, one update each."""
    batch = resized(job.data.batches[0], samples)
    while True:
        job.stepper.step(batch)
        yield samples


def grid(largest: int) -> list[int]:
    """Sizes to scan, in eights."""
    sizes = (8 * round(SMALLEST * 2 ** (i / 2) / 8) for i in itertools.count())
    return list(dict.fromkeys(itertools.takewhile(lambda size: size <= largest, sizes)))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["seed_mlp", "digits_cnn", "byte_gpt"])
def test_choice(name: str, start: str, benchmark) -> None:
    """Times a step of the chosen size; what a scan shows is in ``extra_info``."""
    run, _ = tuned(JOBS[name](), budget=0)
    job = run._job
    job.data.batches = [next(iter(run.loader))]
    own = run.loader.batch_size
    limit = SizeTrials(job).height(HOLDS * own)
    job = Job(replace(job.spec, memory_limit=limit), job.data)
    begin = max(SMALLEST, 8 * round(STARTS[start] * own / 8))

    trials = SizeTrials(job)
    found = trials.find(begin, smallest=SMALLEST, largest=LARGEST)
    assert found.samples is not None

    fitting = list(itertools.takewhile(SizeTrials(job).fits, grid(LARGEST)))
    assert SizeTrials(job).fits(found.samples)
    sizes = dict.fromkeys([*fitting, found.fits, found.samples])
    lanes = {str(size): Lane(str(size), stepped(job, size)) for size in sizes}
    rates = take_turns(list(lanes.values()), ROUNDS, TURN)
    table = {size: round(statistics.median(each)) for size, each in rates.items()}
    chosen = str(found.samples)
    last = {chosen, *sorted(table, key=lambda size: -table[size])[:LAST]}
    rates = take_turns([lanes[size] for size in last], LAST_ROUNDS, LAST_TURN)
    best = fastest(rates)
    share = ratio(rates, chosen, best)
    benchmark.pedantic(partial(lanes[chosen].turn, LAST_TURN), rounds=1)
    print(f"\n{name} from {begin}: {chosen} in {trials.steps} steps, {share:.3f} of the best ({best} samples)")
    print(f"  {found.reason}\n  samples/s by size: {table}")
    benchmark.extra_info |= {
        "start": begin,
        "chosen": found.samples,
        "best": int(best),
        "share of the best": round(share, 3),
        "steps": trials.steps,
        "ran out of memory at": found.too_large,
        "memory limit": job.spec.memory_limit,
        "samples per second by size": table,
        "threads": torch.get_num_threads(),
    }

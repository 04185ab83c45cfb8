"""Claim: the batch size that flatout finds is within 5 % of the speed of the best size of an exhaustive scan.

    pytest benchmarks/batch_size.py -s --full

Each of three models starts with a small batch and with a large batch. A memory limit, as in
``optimize(memory_limit=...)``, allows a few times the large batch. The finder takes its trial steps first. Then the
chosen size takes turns with the largest size that fits, and with all fitting sizes of a grid of half octaves. After
that, the fastest sizes take longer turns. Goals: 0.95 of the best rate, in fewer than 20 steps, with at most one
out-of-memory error.
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
from support.scale import scaled
from support.training_jobs import JOBS
from support.turns import Lane, fastest, ratio, take_turns

from flatout.data import resized
from flatout.training.job import Job
from flatout.tuning.batch_sizes import SizeTrials

SMALLEST = 8
LARGEST = scaled(4096, 512)
HOLDS = 4
"""Memory limit, in multiples of the job's own batch."""

STARTS = {"small": 0.125, "own": 1.0}
"""Starting batch sizes, relative to the job's own size."""

ROUNDS, TURN = scaled((4, 0.25), (1, 0.05))
LAST, LAST_ROUNDS, LAST_TURN = 3, scaled(10, 2), scaled(0.4, 0.1)
"""Number of the fastest sizes that are timed again, because the best of many is partly lucky, and their turns."""


def stepped(job: Job, samples: int) -> Iterator[int]:
    """Yield the samples of steps with ``samples`` samples, each of which is one update."""
    batch = resized(job.data.batches[0], samples)
    while True:
        job.stepper.step(batch)
        yield samples


def grid(largest: int) -> list[int]:
    """Return the sizes to scan, which are multiples of 8."""
    sizes = (8 * round(SMALLEST * 2 ** (i / 2) / 8) for i in itertools.count())
    return list(dict.fromkeys(itertools.takewhile(lambda size: size <= largest, sizes)))


@pytest.mark.parametrize("start", scaled(list(STARTS), ["own"]))
@pytest.mark.parametrize("name", scaled(["seed_mlp", "digits_cnn", "byte_gpt"], ["digits_cnn"]))
def test_choice(name: str, start: str, benchmark) -> None:
    """Time a step of the chosen size. The results of the scan are in ``extra_info``."""
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

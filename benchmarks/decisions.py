"""Claim: what ``flatout.optimize`` chooses is within 5 % of the best that there is to choose.

    python -m pytest benchmarks/decisions.py -s --benchmark-json=benchmarks/results/decisions.json

The jobs of benchmarks/optimize.py. For each, every combination of the techniques that need no compiler (of the six
below, at most five have a meaning for a job) trains in turns with the others; the better half goes on, three times
over, and the last are timed for longer, with the combination that flatout found by itself among them.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from typing import Any

import pytest
import torch
from support.loops import tuned
from support.training_jobs import JOBS, Job
from support.turns import Lane, Rates, closing, fastest, ratio, take_turns

from flatout.core.machine import usable_cores
from flatout.core.snapshot import Snapshot

CONVERTED = {
    "precision": "bf16",
    "channels_last": True,
    "sdpa_backend": "math",
    "fused_optimizer": True,
    "in_memory": True,
}
"""What each technique is forced with; the number of threads depends on the machine."""

APART = {"compile": False, "torchscript": False, "workers": False, "cuda_graph": False}
"""What no combination has."""

BUDGET = 60.0
HALVINGS = 3
SHORT, LONG_TURN = 0.25, 1.0
ROUNDS = 4
LAST_ROUNDS = 12


def techniques() -> dict[str, Any]:
    """All of them, with the values to force."""
    return CONVERTED | {"cpu_threads": max(1, usable_cores() // 2)}


def combinations(job: Job) -> dict[str, Lane]:
    """A lane for each combination that serves the job, by what it turns on."""
    lanes: dict[str, Lane] = {}
    plain = Snapshot.capture([])
    for on in itertools.product((False, True), repeat=len(techniques())):
        forced = {name: value if each else False for (name, value), each in zip(techniques().items(), on, strict=True)}
        with contextlib.suppress(ValueError):  # one of them does not apply
            run, steps = tuned(job, techniques=APART | forced, budget=0)
            name = _name(run.plan.decisions)
            lanes.setdefault(name, Lane(name, steps))
        plain.restore()
    return lanes


def _name(decisions: dict[str, Any]) -> str:
    return " + ".join(sorted(name for name, value in decisions.items() if value is not False)) or "nothing"


@pytest.mark.parametrize("name", JOBS)
def test_choice(name: str, benchmark) -> None:
    """Times the choice; the best of all combinations takes turns with it and is in ``extra_info``."""
    job = JOBS[name]()
    plain = Snapshot.capture([])
    run, _ = tuned(job, techniques=APART, budget=BUDGET)
    chosen = _name(run.plan.decisions)
    plain.restore()
    lanes = combinations(job)
    assert chosen in lanes
    with closing(list(lanes.values())):
        left = set(lanes)
        for _ in range(HALVINGS):
            rates = take_turns([lanes[each] for each in left], ROUNDS, SHORT)
            ranked = sorted(rates, key=lambda each: -statistics.median(rates[each]))
            left = {chosen, "nothing", *ranked[: max(3, len(ranked) // 2)]}
        rates = take_turns([lanes[each] for each in left], LAST_ROUNDS, LONG_TURN)
        benchmark.pedantic(lambda: lanes[chosen].turn(LONG_TURN), rounds=1)
    best = fastest(rates)
    share = ratio(rates, chosen, best)
    tuning = run.report.summary.tuning_seconds
    print(f"\n{job.name}: chosen in {tuning:.0f} s: {chosen}\n  {share:.3f} of the best of {len(lanes)}: {best}")
    print(f"  {ratio(rates, chosen, 'nothing'):.2f}x nothing; {_table(rates)}")
    benchmark.extra_info |= {
        "chosen": chosen,
        "best": best,
        "combinations": len(lanes),
        "share of the best": round(share, 3),
        "times nothing": round(ratio(rates, chosen, "nothing"), 3),
        "tuning seconds": round(tuning, 1),
        "threads": torch.get_num_threads(),
    }


def _table(rates: Rates) -> str:
    return ", ".join(f"{name}: {statistics.median(each):,.0f}/s" for name, each in rates.items())

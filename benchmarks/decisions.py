"""Claim: the choice of ``flatout.optimize`` is within 5 % of the speed of the best combination of techniques.

    pytest benchmarks/decisions.py -s --full

The benchmark runs the jobs of benchmarks/optimize.py. For each job, all combinations of the techniques without a
compiler train in turns. Of the six techniques below, at most five apply to a job. The faster half of the combinations
stays in each of three rounds. The remaining combinations are timed for longer, together with flatout's own choice.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from typing import Any

import pytest
import torch
from support.loops import tuned
from support.scale import scaled
from support.training_jobs import JOBS, Job
from support.turns import Lane, Rates, closing, fastest, ratio, take_turns

from flatout.core.machine import usable_cores
from flatout.core.snapshot import Snapshot

VALUES = {
    "precision": "bf16",
    "channels_last": True,
    "sdpa_backend": "math",
    "fused_optimizer": True,
    "in_memory": True,
    "cpu_threads": max(1, usable_cores() // 2),
}
"""Value with which each technique is forced."""

COMBINED = {name: VALUES[name] for name in scaled(list(VALUES), ["fused_optimizer", "in_memory"])}
"""Techniques of the combinations."""

APART = dict.fromkeys(
    ("compile", "torchscript", "workers", "decode", "prefix_cache", "cuda_graph", *(VALUES.keys() - COMBINED)), False
)
"""Techniques that no combination has."""

BUDGET = scaled(60.0, 3.0)
HALVINGS = scaled(3, 1)
SHORT, LONG_TURN = scaled((0.25, 1.0), (0.05, 0.1))
ROUNDS = scaled(4, 1)
LAST_ROUNDS = scaled(12, 2)


def combinations(job: Job) -> dict[str, Lane]:
    """Return a lane for each combination that applies to the job, by the names of its techniques."""
    lanes: dict[str, Lane] = {}
    plain = Snapshot.capture([])
    for on in itertools.product((False, True), repeat=len(COMBINED)):
        forced = {name: value if each else False for (name, value), each in zip(COMBINED.items(), on, strict=True)}
        with contextlib.suppress(ValueError):  # a technique does not apply
            run, steps = tuned(job, techniques=APART | forced, budget=0)
            name = _name(run.plan.decisions)
            lanes.setdefault(name, Lane(name, steps))
        plain.restore()
    return lanes


def _name(decisions: dict[str, Any]) -> str:
    return " + ".join(sorted(name for name, value in decisions.items() if value is not False)) or "nothing"


@pytest.mark.parametrize("name", scaled(list(JOBS), ["tabular"]))
def test_choice(name: str, benchmark) -> None:
    """Time the choice in turns with the best combinations. Their results are in ``extra_info``."""
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

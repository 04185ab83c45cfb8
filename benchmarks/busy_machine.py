"""Claim: headline gains are true and budgets hold beside other programs, and no job gets slower on a quiet machine.

    pytest benchmarks/busy_machine.py -s --full

Four jobs run beside 0, 2, 4 and 8 busy loops, six times each. A run calls ``optimize(plan=None)`` with its default
budget, in a separate process. Then, beside the same busy loops, the tuned loop takes turns with the original loop. This
comparison takes ten times as long as the last race of ``optimize``. As in that race, the original loop has the rules,
which require no trial. It runs in another process.

Goals for a quiet machine: every tuned loop reaches 0.97 of the speed of the original loop. The tuning takes no longer
than the budget, one update, and the setup that runs at the end of the budget.

    readme      the README's call, with its 10 epochs, for a perceptron on a table
    digits_cnn  a long training (100,000 steps), as in the other benchmarks
    byte_gpt    a long training (100,000 steps)
    long_step   ResNet-18 with a batch for which a plain update takes 2 s on the quiet machine, with a budget of 60 s

With ``--full``, each run is added to benchmarks/results/busy_machine.json, or to $OUT/busy_machine.json if $OUT is set.
Recorded runs are not repeated, so a second call continues. Every job runs beside every load once before the second runs
begin.

``-k "digits_cnn and busy8"`` chooses runs. ``FLATOUT_BENCH_SECONDS=3000`` starts no run that is expected to end after
3000 s.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import pytest
from support.intervals import gain
from support.loops import LONG, kept_by, naive, tuned
from support.machine_facts import machine
from support.observed_calls import observed
from support.run_records import RunRecords
from support.scale import scaled
from support.training_jobs import Job, byte_gpt, digits_cnn, resnet, tabular
from support.turns import LaneApart, closing, take_turns

from flatout.report.model import Gain
from flatout.tuning import agenda, race, trials
from tests.noise.record import busy_processes

COMMAND = "pytest benchmarks/busy_machine.py --full"

RUNS = scaled(6, 1)
LAST_SECOND = time.monotonic() + float(os.environ.get("FLATOUT_BENCH_SECONDS", "inf"))
LOADS = scaled((0, 2, 4, 8), (1,))

UPDATE_SECONDS = scaled(2.0, 0.1)
"""Duration of a plain update of ``long_step`` on the quiet machine."""

TIMES_THE_RACE = scaled(10, 1)
FEWEST_ROUNDS = scaled(24, 2)
TURN = scaled(1.0, 0.1)

SLOWEST = 0.97
"""Goal for the speed of a tuned loop on a quiet machine, relative to the original."""


@dataclass(frozen=True)
class Case:
    """Training to be measured.

    Attributes:
        make: makes the job from the batch size of ``long_step``, which the others ignore.
        expected_steps: length of the training in batches, by the job.
    """

    make: Callable[[int], Job]
    expected_steps: Callable[[Job], int]


CASES = {
    "readme": Case(lambda _: tabular(), lambda job: 10 * math.ceil(len(job.dataset) / job.batch_size)),  # type: ignore[arg-type]
    "digits_cnn": Case(lambda _: digits_cnn(), lambda _: LONG),
    "byte_gpt": Case(lambda _: byte_gpt(), lambda _: LONG),
    "long_step": Case(lambda samples: resnet(8 * samples, samples), lambda _: 1000),
}

CELLS = [(name, load, run) for run in range(1, RUNS + 1) for load in LOADS for name in scaled(list(CASES), ["readme"])]


def plain_update_seconds(samples: int) -> float:
    """Return the seconds of an update of ``long_step`` in the naive loop."""
    steps, took = naive(CASES["long_step"].make(samples)), list[float]()
    for _ in range(4):
        begun = time.perf_counter()
        next(steps)
        took.append(time.perf_counter() - begun)
    return statistics.median(took[1:])


def long_step() -> dict[str, Any]:
    """Return the batch size for which a plain update takes ``UPDATE_SECONDS``, and the measured seconds."""
    samples = 8
    while (seconds := plain_update_seconds(samples)) < UPDATE_SECONDS / 4:
        samples *= 2
    samples = max(8, 8 * round(samples * UPDATE_SECONDS / seconds / 8))
    load = os.getloadavg()[0]
    return {"samples": samples, "plain update seconds": plain_update_seconds(samples), "load average": load}


def original_loop(name: str, samples: int) -> tuple[Iterator[int], None]:
    """Return the steps of the original loop, with the rules on."""
    return tuned(CASES[name].make(samples), plan=None, budget=0)[1], None


def tuned_loop(name: str, samples: int) -> tuple[Iterator[int], dict[str, Any]]:
    """Return the steps of the tuned loop, and figures of the tuning."""
    case = CASES[name]
    job = case.make(samples)
    with (
        observed(trials, "seconds") as setups,
        observed(race, "race_once") as races,
        observed(agenda, "race") as last_stages,
    ):
        run, steps = tuned(job, plan=None, expected_steps=max(1, case.expected_steps(job) // scaled(1, 10)))
    summary, plan = run.report.summary, run.plan
    (last_stage,) = last_stages
    budget = last_stage.args[0].budget
    deadline = time.perf_counter() - budget.spent + budget.seconds
    under_way = sum(call.ended - deadline for call in setups if call.begun < deadline < call.ended)
    paces = [pace.total_ms / 1e3 for pace in (summary.before, summary.after) if pace is not None]
    return steps, {
        "headline": _gain(summary.gain),
        "statistic": summary.gain_statistic,
        "kept": kept_by(run),
        "won": list(summary.won),
        "tuning seconds": summary.tuning_seconds,
        "budget seconds": budget.seconds,
        "update seconds": paces,
        "setup seconds under way": under_way,
        "seconds above": summary.tuning_seconds - budget.seconds - max(paces, default=0.0) - under_way,
        "noise": plan.noise,
        "load average at its start": plan.load_average,
        "undecided": list(plan.undecided),
        "race seconds": races[-1].seconds if races else 0.0,
    }


def _gain(found: Gain | None) -> list[float] | None:
    return None if found is None else [found.ratio, found.low, found.high]


def rounds_for(figures: dict[str, Any]) -> int:
    """Return the number of rounds that take ``TIMES_THE_RACE`` times as long as the race."""
    a_round = sum(max(TURN, seconds) for seconds in figures["update seconds"])
    return max(FEWEST_ROUNDS, math.ceil(TIMES_THE_RACE * figures["race seconds"] / (a_round or TURN)))


def measured(name: str, load: int, samples: int) -> dict[str, Any]:
    """Return the figures of a run."""
    begun, before = time.monotonic(), os.getloadavg()[0]
    with busy_processes(load), closing([ours := LaneApart("tuned", tuned_loop, name, samples)]):
        figures = ours.told
        with closing([theirs := LaneApart("original", original_loop, name, samples)]):
            compared = time.monotonic()
            rates = take_turns([ours, theirs], rounds_for(figures), TURN)
            figures["long race seconds"] = time.monotonic() - compared
        figures["long race"] = _gain(gain(rates, "tuned", "original"))
        figures["long race rounds"] = len(rates["tuned"])
    return figures | {
        "load averages": [before, os.getloadavg()[0]],
        "seconds": time.monotonic() - begun,
    }


@pytest.mark.parametrize(
    ("name", "load", "run"), CELLS, ids=[f"{name}-busy{load}-run{run}" for name, load, run in CELLS]
)
def test_run(name: str, load: int, run: int) -> None:
    """Add one run to the results."""
    records = RunRecords("busy_machine.json", COMMAND)
    cell = {"job": name, "busy loops": load}
    if records.find(**cell, run=run):
        pytest.skip("is in the results")
    expected = [each["seconds"] for each in records.find(**cell)]
    if time.monotonic() + statistics.median(expected or [0.0]) > LAST_SECOND:
        pytest.skip("has no time left")
    samples = records.common("long step", long_step)["samples"] if name == "long_step" else 0
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    figures = measured(name, load, samples)
    records.add({**cell, "run": run, "date": date, "machine": machine(), **figures})
    print(f"\n{name} beside {load} busy loops: {figures}", flush=True)


def holds(record: dict[str, Any]) -> bool:
    """Return True if the headline's interval contains the ratio of the long race."""
    _, low, high = record["headline"]
    return low <= record["long race"][0] <= high


def test_summary() -> None:
    """Print a table of all runs so far."""
    records = RunRecords("busy_machine.json", COMMAND)
    print("\njob         busy runs headline      true slowest    seconds: above   tuning  budget")
    for name in CASES:
        for load in LOADS:
            found = records.find(**{"job": name, "busy loops": load})
            if not found:
                continue
            headlines = [each for each in found if each["headline"] is not None]
            ratio = statistics.median(each["headline"][0] for each in headlines) if headlines else math.nan
            true = f"{sum(map(holds, headlines))} of {len(headlines)}"
            slowest = min(each["long race"][0] for each in found)
            goal = "" if load or slowest >= SLOWEST else f" (goal {SLOWEST}: missed)"
            above = max(each["seconds above"] for each in found)
            tuning, budget = (
                statistics.median(each[f"{what} seconds"] for each in found) for what in ("tuning", "budget")
            )
            print(
                f"{name:11} {load:4} {len(found):4} {ratio:8.3f} {true:>9} {slowest:7.3f} {above:17.2f} {tuning:8.2f} "
                f"{budget:7.2f}{goal}"
            )

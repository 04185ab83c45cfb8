"""Claim: on simulated machines decisions hold beside any noise, and take a third of the time of the rule before.

    python -m pytest benchmarks/decisions_noise.py -s --benchmark-json=benchmarks/results/decisions_noise.json

Operating curve of a paired trial: how often it keeps a candidate of a known true gain, after how many pairs and
seconds, and how often its interval holds the truth. "Headline" is the interval of 12 pairs of mean wall times, whose
number is fixed before the first. Beside it stands the rule before: the bootstrap median of wall times, looked at after
12 pairs and every 4 more, within 4 s. Both see the same pairs. Then ten factors at once: the speed that their
decisions reach. Before, each factor had a trial of its own, one after the other.

All times are simulated (tests/noise), so that the load of this machine does not matter. ``FLATOUT_BENCH_REPEATS=1000``
repeats each cell so often instead of 40 times: the standard error of 1 % is then 0.3 %.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import pytest

from flatout.core.machine import usable_cores
from flatout.tuning.block import Block
from flatout.tuning.noise import Pair
from flatout.tuning.statistics import fixed_gain
from flatout.tuning.trial import KEEP_ABOVE, measure_pairs
from tests.noise.combinations import Factors, decide
from tests.noise.simulator import SCENARIOS, Machine
from tests.noise.trials import Cell, Result, trial

REPEATS = int(os.environ.get("FLATOUT_BENCH_REPEATS", "40"))
GAINS = (0.90, 0.98, 1.0, 1.02, 1.05, 1.2, 2.0)
LIMITS = {0.0005: 10.0, 0.005: 10.0, 0.1: 10.0, 2.0: 48.0}
"""Seconds of a trial, by the seconds of a step."""

HEADLINE_PAIRS = 12

BUDGETS = {0.005: (6.0, 8), 0.2: (20.0, 4), 2.0: (60.0, 2)}
"""Seconds for ten factors and pairs of the baseline with itself, by the seconds of a step."""


class Old:
    """The rule before: the median of paired ratios with its percentile bootstrap."""

    FEWEST_PAIRS, MOST_PAIRS, HOPELESS_AFTER, SECONDS, RESAMPLES = 6, 40, 3, 4.0, 2000

    @staticmethod
    @cache
    def _picks(pairs: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, pairs, size=(Old.RESAMPLES, pairs))

    @staticmethod
    def interval(ratios: Sequence[float]) -> tuple[float, float]:
        """Return the 95 % interval of the median."""
        medians = np.median(np.asarray(ratios)[Old._picks(len(ratios))], axis=1)
        low, high = np.percentile(medians, [2.5, 97.5])
        return float(low), float(high)

    @staticmethod
    def is_clear(ratios: Sequence[float]) -> bool:
        """Return True if more pairs would not change the verdict."""
        if len(ratios) == Old.HOPELESS_AFTER and max(ratios) < 0.8:
            return True
        if len(ratios) < 2 * Old.FEWEST_PAIRS or len(ratios) % 4:
            return False
        low, high = Old.interval(ratios)
        return low > 1 + 2 * (KEEP_ABOVE - 1) or high < 1.0

    @staticmethod
    def trial(pairs: Any, machine: Machine, limit: float) -> Result:
        """Add pairs until the verdict is clear or the time is up."""
        start, ratios, took = machine.wall, list[float](), 0.0
        for old, new in itertools.islice(pairs, Old.MOST_PAIRS):
            ratios.append(old.mean / new.mean)
            took = machine.wall - start
            is_late = took > limit or (took > Old.SECONDS and len(ratios) >= Old.FEWEST_PAIRS)
            if is_late or Old.is_clear(ratios):
                break
        low, high = Old.interval(ratios)
        keeps = low > KEEP_ABOVE and len(ratios) >= Old.FEWEST_PAIRS
        return Result("faster" if keeps else "not faster", len(ratios), took, low, high)


def old_trial(cell: Cell, seed: int) -> Result:
    machine = Machine(cell.scenario, seed)
    return Old.trial(cell.pairs(machine, cell.gain), machine, cell.limit)


def headline(cell: Cell, seed: int) -> Result:
    """Race a candidate in a fixed number of pairs."""
    machine = Machine(cell.scenario, seed)
    pairs: list[Pair] = list(itertools.islice(cell.pairs(machine, cell.gain), HEADLINE_PAIRS))
    gain = fixed_gain([math.log(old.mean / new.mean) for old, new in pairs])
    return Result("", len(pairs), machine.wall, gain.low, gain.high)


class Curve(NamedTuple):
    """Operating curve in one cell: shares in percent, and medians."""

    kept: float
    pairs: float
    seconds: float
    covered: float

    @classmethod
    def of(cls, results: Sequence[Result], gain: float) -> Curve:
        return cls(
            kept=100 * fmean(result.verdict == "faster" for result in results),
            pairs=median(result.pairs for result in results),
            seconds=median(result.seconds for result in results),
            covered=100 * fmean(result.low <= gain <= result.high for result in results),
        )


RULES: dict[str, Callable[[Cell, int], Result]] = {"now": trial, "before": old_trial, "headline": headline}


def _cell(task: tuple[str, str, float, float]) -> Curve:
    rule, scenario, step, gain = task
    cell = Cell(SCENARIOS[scenario], step, gain, LIMITS[step])
    return Curve.of([RULES[rule](cell, seed) for seed in range(REPEATS)], gain)


def _in_processes(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    with multiprocessing.get_context("fork").Pool(usable_cores()) as pool:
        return pool.map(function, tasks, chunksize=1)


@pytest.mark.parametrize("step", LIMITS, ids=lambda step: f"{1e3 * step:g} ms")
def test_operating_curve(step: float, benchmark) -> None:
    """Times one trial; the curves of both rules are in ``extra_info``."""
    tasks = [(rule, scenario, step, gain) for rule in RULES for scenario in SCENARIOS for gain in GAINS]
    curves = dict(zip(tasks, _in_processes(_cell, tasks), strict=True))
    cell = Cell(SCENARIOS["4 busy"], step, 1.05, LIMITS[step])
    benchmark.pedantic(lambda: trial(cell, 0), rounds=3)
    print(f"\nsteps of {1e3 * step:g} ms, {REPEATS} repeats: kept %, median pairs, median seconds; interval true %")
    for rule in ("now", "before"):
        print(f"  {rule:20}" + "".join(f"{gain:>26g}  " for gain in GAINS))
        for scenario in SCENARIOS:
            cells = [curves[rule, scenario, step, gain] for gain in GAINS]
            texts = [f"{c.kept:5.1f} {c.pairs:5g} {c.seconds:6.2f} {c.covered:6.1f} |" for c in cells]
            print(f"    {scenario:18}" + "".join(f"{text:>28}" for text in texts))
    summary = {rule: _summary({key[1:]: c for key, c in curves.items() if key[0] == rule}, step) for rule in RULES}
    summary["headline"] = {"interval true, worst %": summary["headline"]["interval true, worst %"]}
    for rule, figures in summary.items():
        print(f"  {rule}: " + ", ".join(f"{name} {figure:g}" for name, figure in figures.items()))
    benchmark.extra_info |= {
        "repeats": REPEATS,
        **summary,
        "curves": {
            f"{rule}, {scenario}, {gain:g}": [round(figure, 2) for figure in curve]
            for (rule, scenario, _, gain), curve in curves.items()
        },
    }


def _summary(curves: dict[tuple[str, float, float], Curve], step: float) -> dict[str, float]:
    def worst_kept(most: float) -> float:
        return max(curve.kept for (_, _, gain), curve in curves.items() if gain <= most)

    figures = {
        "kept at -2 % or less, worst %": worst_kept(0.98),
        "kept at 0, worst %": max(curve.kept for (_, _, gain), curve in curves.items() if gain == 1.0),
        "+5 % quiet, %": curves["quiet", step, 1.05].kept,
        "+5 % beside 4 busy, %": curves["4 busy", step, 1.05].kept,
        "+5 % quiet, s": curves["quiet", step, 1.05].seconds,
        "2x, most median pairs": max(curve.pairs for (_, _, gain), curve in curves.items() if gain == 2.0),
        "interval true, worst %": min(curve.covered for curve in curves.values()),
        "interval true, mean %": fmean(curve.covered for curve in curves.values()),
    }
    return {name: round(figure, 2) for name, figure in figures.items()}


def one_at_a_time(factors: Factors, seconds: float) -> list[int]:
    """Decide factors as before: a trial for each, with those that were kept before."""
    kept: list[int] = []
    for i in range(len(factors.gains)):
        left = seconds - factors.machine.wall
        if left <= 0:
            break
        without, with_it = (partial(_block, factors, on) for on in (kept, [*kept, i]))
        if Old.trial(measure_pairs(without, with_it), factors.machine, left).verdict == "faster":
            kept = [*kept, i]
    return kept


def _block(factors: Factors, on: Sequence[int], _: int) -> Block:
    return factors.block(on)


def _factors(task: tuple[str, float, float, str, int]) -> tuple[float, float, bool, float]:
    """Return the log gain of what is kept, the largest possible one, whether a slower one is kept, and the seconds."""
    scenario, step, interaction, rule, seed = task
    factors = Factors.drawn(SCENARIOS[scenario], step, seed, interaction)
    seconds, noise_pairs = BUDGETS[step]
    kept = decide(factors, seconds, noise_pairs) if rule == "now" else one_at_a_time(factors, seconds)
    slower = any(factors.gains[i] <= -0.02 for i in kept)
    return factors.log_gain(kept), factors.best, slower, factors.machine.wall


@pytest.mark.parametrize("step", BUDGETS, ids=lambda step: f"{1e3 * step:g} ms")
@pytest.mark.parametrize("interaction", [0.0, 0.3])
def test_ten_factors(step: float, interaction: float, benchmark) -> None:
    """Times one decision; the speeds that both rules reach are in ``extra_info``."""
    seconds, noise_pairs = BUDGETS[step]
    factors = Factors.drawn(SCENARIOS["quiet"], step, 0, interaction)
    benchmark.pedantic(lambda: decide(factors, seconds, noise_pairs), rounds=1)
    print(f"\nten factors, steps of {1e3 * step:g} ms, {seconds:g} s, interactions {interaction:g}, {REPEATS} repeats")
    for scenario in SCENARIOS:
        figures: dict[str, Any] = {}
        for rule in ("now", "before"):
            tasks = [(scenario, step, interaction, rule, seed) for seed in range(REPEATS)]
            gains, best, slower, took = zip(*_in_processes(_factors, tasks), strict=True)
            figures |= {
                rule: round(math.exp(fmean(gains)), 2),
                f"{rule}: slower kept, %": round(100 * fmean(slower), 1),
                f"{rule}, s": round(fmean(took), 1),
                "possible": round(math.exp(fmean(best)), 2),
            }
        print(f"  {scenario:18} " + ", ".join(f"{name} {figure}" for name, figure in figures.items()))
        benchmark.extra_info[scenario] = figures

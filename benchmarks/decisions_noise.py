"""Claim: on simulated machines, decisions are right in any noise, in a third of the time of the old rule.

    pytest benchmarks/decisions_noise.py -s --full

The operating curve of a paired trial consists of three figures for a candidate with a known true gain: how often the
trial keeps the candidate, after how many pairs and seconds, and how often its interval contains the true gain. "Wall
time" is the trial of a candidate whose CPU time is not comparable. The old rule, "before", is the bootstrap median of
wall times within 4 s. It was tested after 12 pairs and after every 4 more.

"Headline" is the interval of a race. The number of its pairs is fixed in advance: 12, or 5 in a small budget. Gains of
20 % and more, and updates of seconds, need only 3 pairs. Each race is decided by mean wall time and by the statistic
that the tuner would choose. "Pairs alone" is the interval without the noise floor. "Alternating" pairs begin with the
loop that ended the last pair.

The third test decides ten factors at once, and shows the resulting speed. With the old rule, each factor had a separate
trial, one after the other.

All times are simulated (tests/noise), so the load of this machine has no effect. At full size, each cell has 1,000
repeats. A share of 1 % then has a standard error of 0.3 %.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.scale import scaled

from flatout.core.machine import usable_cores
from flatout.tuning.acceptance import KEEP_ABOVE
from flatout.tuning.pairs import measure_pairs
from flatout.tuning.statistics import UNKNOWN_NOISE, NoiseFloor, fixed_gain
from flatout.tuning.stopwatch import Block
from tests.noise.combinations import Factors, decide
from tests.noise.simulator import SCENARIOS, Machine
from tests.noise.trials import Cell, Race, Result, races, trial

REPEATS = scaled(1000, 5)
GAINS = (0.90, 0.98, 1.0, 1.02, 1.05, 1.2, 2.0)
LIMITS = {0.0005: 10.0, 0.005: 10.0, 0.1: 10.0, 2.0: 48.0}
"""Time limit of a trial in seconds, by the seconds of a step."""

HEADLINE_GAINS = (0.98, 1.0, 1.05, 1.2, 2.0)
HEADLINE_PAIRS = (12, 5, 3)
LARGE_GAIN = 1.2
"""Gain from which three pairs are enough for a headline."""

FEWER_REPEATS = min(REPEATS, 100)
"""Repeats of ten factors with interactions, and with the old rule."""

BUDGETS = {0.005: 6.0, 0.2: 20.0, 2.0: 60.0}
"""Budget for ten factors in seconds, by the seconds of a step."""


class Old:
    """Old rule: the median of paired ratios with its percentile bootstrap."""

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


class Rule(NamedTuple):
    """Rule of trials, and the true gains of its candidates."""

    run: Callable[[Cell, int], Result]
    gains: Sequence[float]


RULES = {
    "now": Rule(trial, GAINS),
    "now, wall time": Rule(partial(trial, keeps_cpu_time=False), (0.98,)),
    "before": Rule(old_trial, (1.05,)),
}


def _curve(task: tuple[str, str, float, float]) -> Curve:
    rule, scenario, step, gain = task
    cell = Cell(SCENARIOS[scenario], step, gain, LIMITS[step])
    return Curve.of([RULES[rule].run(cell, seed) for seed in range(REPEATS)], gain)


class Headline(NamedTuple):
    """Setting of a race: the number of pairs, the statistic that compares them, and the rule for the interval."""

    pairs: int
    statistic: str
    rule: str


def _headlines(task: tuple[str, float, float]) -> dict[Headline, tuple[float, float]]:
    """Return the share of intervals with the true gain, and their median half width, both in percent."""
    scenario, step, gain = task
    cell = Cell(SCENARIOS[scenario], step, gain, LIMITS[step])
    covered, widths = defaultdict[Headline, list[bool]](list), defaultdict[Headline, list[float]](list)

    def add(kind: Headline, race: Race, floor: NoiseFloor) -> None:
        found = fixed_gain(race.differences[: kind.pairs], floor)
        covered[kind].append(found.low <= gain <= found.high)
        widths[kind].append(50 * math.log(found.high / found.low))

    for seed in range(REPEATS):
        by_statistic = races(cell, seed, max(HEADLINE_PAIRS))
        compared = {"wall": by_statistic["wall"]}
        if not cell.is_long:
            compared["chosen"] = by_statistic.get("cpu", by_statistic["wall"])
        in_turns = races(cell, seed, max(HEADLINE_PAIRS), alternates=True)["wall"] if cell.is_long else None
        for pairs in HEADLINE_PAIRS if gain >= LARGE_GAIN or cell.is_long else HEADLINE_PAIRS[:-1]:
            for statistic, race in compared.items():
                add(Headline(pairs, statistic, "random order"), race, race.floor)
                add(Headline(pairs, statistic, "pairs alone"), race, UNKNOWN_NOISE)
            if in_turns:
                add(Headline(pairs, "wall", "alternating order"), in_turns, in_turns.floor)
    return {kind: (100 * fmean(covered[kind]), median(widths[kind])) for kind in covered}


def _in_processes(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    with multiprocessing.get_context("fork").Pool(usable_cores()) as pool:
        return pool.map(function, tasks, chunksize=1 + len(tasks) // 100)


by_step = pytest.mark.parametrize("step", scaled(list(LIMITS), [0.005]), ids=lambda step: f"{1e3 * step:g} ms")


@by_step
def test_operating_curve(step: float, benchmark) -> None:
    """Time one trial. The curves of the rules are in ``extra_info``."""
    tasks = [
        (name, scenario, step, gain) for name, rule in RULES.items() for scenario in SCENARIOS for gain in rule.gains
    ]
    curves = dict(zip(tasks, _in_processes(_curve, tasks), strict=True))
    cell = Cell(SCENARIOS["4 busy"], step, 1.05, LIMITS[step])
    benchmark.pedantic(lambda: trial(cell, 0), rounds=3)
    print(f"\nsteps of {1e3 * step:g} ms, {REPEATS} repeats: kept %, median pairs, median seconds; interval true %")
    for name, rule in RULES.items():
        print(f"  {name:20}" + "".join(f"{gain:>26g}  " for gain in rule.gains))
        for scenario in SCENARIOS:
            cells = [curves[name, scenario, step, gain] for gain in rule.gains]
            texts = [f"{c.kept:5.1f} {c.pairs:5g} {c.seconds:6.2f} {c.covered:6.1f} |" for c in cells]
            print(f"    {scenario:18}" + "".join(f"{text:>28}" for text in texts))
    summaries = {rule: _summary({key[1:]: c for key, c in curves.items() if key[0] == rule}, step) for rule in RULES}
    for rule, figures in summaries.items():
        print(f"  {rule}: " + ", ".join(f"{name} {figure:g}" for name, figure in figures.items()))
    benchmark.extra_info |= {
        "repeats": REPEATS,
        **summaries,
        "curves": {
            f"{rule}, {scenario}, {gain:g}": [round(figure, 2) for figure in curve]
            for (rule, scenario, _, gain), curve in curves.items()
        },
    }


def _summary(curves: dict[tuple[str, float, float], Curve], step: float) -> dict[str, float]:
    def worst(figure: Callable[[Curve], float], true: Callable[[float], bool]) -> float:
        return max((figure(curve) for (_, _, gain), curve in curves.items() if true(gain)), default=math.nan)

    figures = {
        "kept at -2 % or less, worst %": worst(lambda curve: curve.kept, lambda gain: gain <= 0.98),
        "kept at 0, worst %": worst(lambda curve: curve.kept, lambda gain: gain == 1.0),
        "2x, most median pairs": worst(lambda curve: curve.pairs, lambda gain: gain == 2.0),
        "interval true, worst %": min(curve.covered for curve in curves.values()),
        "interval true, mean %": fmean(curve.covered for curve in curves.values()),
    }
    for scenario in ("quiet", "4 busy"):
        if found := curves.get((scenario, step, 1.05)):
            figures |= {f"+5 % {scenario}, %": found.kept, f"+5 % {scenario}, s": found.seconds}
    return {name: round(figure, 2) for name, figure in figures.items() if not math.isnan(figure)}


@by_step
def test_headline(step: float, benchmark) -> None:
    """Time one race. The shares of intervals with the true gain are in ``extra_info``."""
    tasks = [(scenario, step, gain) for scenario in SCENARIOS for gain in HEADLINE_GAINS]
    found = dict(zip(tasks, _in_processes(_headlines, tasks), strict=True))
    cell = Cell(SCENARIOS["4 busy"], step, 1.05, LIMITS[step])
    benchmark.pedantic(lambda: races(cell, 0, max(HEADLINE_PAIRS)), rounds=3)
    print(f"\nheadline, steps of {1e3 * step:g} ms, {REPEATS} repeats: interval true %, half width % when quiet")
    benchmark.extra_info["repeats"] = REPEATS
    for kind in found["quiet", step, 2.0]:
        covered = {task: shares[kind][0] for task, shares in found.items() if kind in shares}
        (scenario, _, gain), least = min(covered.items(), key=lambda item: item[1])
        figures = {
            "interval true, worst %": round(least, 2),
            "worst": f"{scenario}, {gain:g}",
            "interval true, mean %": round(fmean(covered.values()), 2),
            "half width of a quiet 1.2x, %": round(found["quiet", step, 1.2][kind][1], 2),
        }
        name = f"{kind.rule}, {kind.pairs} pairs, {kind.statistic}"
        print(f"  {name:36} " + ", ".join(f"{what} {figure}" for what, figure in figures.items()))
        cells = {f"{scenario}, {gain:g}": round(share, 1) for (scenario, _, gain), share in covered.items()}
        benchmark.extra_info[name] = figures | {"interval true, %": cells}


def one_at_a_time(factors: Factors, seconds: float) -> list[int]:
    """Decide factors by the old rule: one trial for each, while the kept factors are on."""
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
    """Return the log gain of the kept factors, the largest possible one, True if one is slower, and the seconds."""
    scenario, step, interaction, rule, seed = task
    factors = Factors.drawn(SCENARIOS[scenario], step, seed, interaction)
    kept = decide(factors, BUDGETS[step]) if rule == "now" else one_at_a_time(factors, BUDGETS[step])
    slower = any(factors.gains[i] <= -0.02 for i in kept)
    return factors.log_gain(kept), factors.best, slower, factors.machine.wall


@pytest.mark.parametrize("step", scaled(list(BUDGETS), [0.005]), ids=lambda step: f"{1e3 * step:g} ms")
@pytest.mark.parametrize("interaction", [0.0, 0.3])
def test_ten_factors(step: float, interaction: float, benchmark) -> None:
    """Time one decision. The speeds that both rules reach are in ``extra_info``."""
    seconds = BUDGETS[step]
    factors = Factors.drawn(SCENARIOS["quiet"], step, 0, interaction)
    benchmark.pedantic(lambda: decide(factors, seconds), rounds=1)
    print(f"\nten factors, steps of {1e3 * step:g} ms, {seconds:g} s, interactions {interaction:g}")
    for scenario in SCENARIOS:
        figures: dict[str, Any] = {}
        for rule in ("now", "before"):
            repeats = REPEATS if rule == "now" and not interaction else FEWER_REPEATS
            tasks = [(scenario, step, interaction, rule, seed) for seed in range(repeats)]
            gains, best, slower, took = zip(*_in_processes(_factors, tasks), strict=True)
            figures |= {
                rule: round(math.exp(fmean(gains)), 2),
                f"{rule}: slower kept, %": round(100 * fmean(slower), 1),
                f"{rule}, s": round(fmean(took), 1),
                f"{rule}, repeats": repeats,
            }
            if rule == "now":
                figures["possible"] = round(math.exp(fmean(best)), 2)
        print(f"  {scenario:18} " + ", ".join(f"{name} {figure}" for name, figure in figures.items()))
        benchmark.extra_info[scenario] = figures

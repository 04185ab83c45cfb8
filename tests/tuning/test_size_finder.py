"""Batch-size finder on simulated machines, without timing."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from flatout.tuning.batch_sizes import NOISE, WITHIN, Found, Probe, find
from tests.reasons import bounds

SLOPE = 1000
"""Bytes of a sample."""


@dataclass(frozen=True)
class Machine:
    """Simulated cost of a step by its number of samples, and the limits of the search.

    Attributes:
        overhead: time of a step without samples, relative to the time of one sample.
        start: the user's batch size.
        largest: the largest batch size allowed.
        capacity: samples that fit in memory if ``bend`` is 0.
        resident: bytes that every step needs, also without samples.
        bend: bytes per squared sample.
        cliff: batch size from which a sample takes ``dearer`` times as long.
        noise: largest relative error of a time.
        counts: True if bytes are known.
        ends: True if steps above the limit run out of memory.
    """

    overhead: float
    start: int
    largest: int
    capacity: int
    resident: int = 10 * SLOPE
    bend: int = 0
    cliff: float = math.inf
    dearer: float = 1.0
    noise: float = 0.0
    counts: bool = True
    ends: bool = True

    @property
    def limit(self) -> int:
        return self.resident + SLOPE * self.capacity

    def seconds(self, samples):
        return 1e-3 * (self.overhead + np.where(np.less(samples, self.cliff), 1.0, self.dearer) * samples)

    def bytes(self, samples):
        return self.resident + SLOPE * samples + self.bend * samples**2

    def fits(self, samples):
        return self.bytes(samples) <= self.limit

    def rate(self, samples):
        """Return the samples per second without noise."""
        return samples / self.seconds(samples)

    def best_rate(self) -> float:
        """Return the best rate among all allowed batch sizes that fit in memory."""
        eights = np.arange(8, self.largest + 1, 8)
        sizes = np.concatenate([np.arange(1, min(8, self.largest + 1)), eights, [self.start, self.largest]])
        return self.rate(sizes[self.fits(sizes)]).max()


@dataclass
class Trials:
    """Probe of a machine, with a record of its calls."""

    machine: Machine
    seed: int = 0
    taken: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def __call__(self, samples: int) -> Probe | None:
        machine = self.machine
        error = random.Random(f"{self.seed} {samples}").uniform(-machine.noise, machine.noise)
        self.taken.append(samples)
        if not machine.fits(samples):
            self.failed.append(samples)
            if machine.ends:
                return None
        seconds = float(machine.seconds(samples)) * (1 + error)
        return Probe(samples, seconds, machine.bytes(samples) if machine.counts else None)

    def find(self, **options: int) -> Found:
        machine = self.machine
        question = {"start": machine.start, "largest": machine.largest, "limit": machine.limit}
        return find(self, **question | {"resident": machine.resident} | options)


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


more = logarithmic(1, 300)


@st.composite
def machines(draw, held=more, **settings):
    """Draw machines with linear time and memory, which hold ``held * start`` samples."""
    start = draw(st.integers(1, 600))
    drawn = {"overhead": start * draw(logarithmic(1e-4, 300)), "resident": draw(st.integers(0, 10**6))}
    drawn |= {name: draw(setting) for name, setting in settings.items()}
    samples, bend = int(start * draw(held)), drawn.get("bend", 0)
    capacity = math.ceil(samples + bend * samples**2 / SLOPE)
    largest = max(start, int(start * draw(more)))
    return Machine(start=start, largest=largest, capacity=capacity, **drawn)


@st.composite
def machines_with_a_cliff(draw):
    """Draw machines with a cliff that the finder guarantees to find."""
    machine = draw(machines(dearer=st.floats(1.5, 3)))
    cliff = machine.start * draw(logarithmic(1 / 4, 16))
    return replace(machine, cliff=cliff, overhead=cliff * draw(logarithmic(1e-4, 0.05)))


jagged = {"cliff": logarithmic(1, 10_000), "dearer": st.floats(1, 5), "noise": st.floats(0, 0.1)}
any_machine = machines(
    logarithmic(1e-3, 300), bend=st.integers(0, 1000), counts=st.booleans(), ends=st.booleans(), **jagged
)


# ---- tried sizes -------------------------------------------------------------------------------------------


@given(any_machine, st.integers(1, 8), st.integers(1, 600), st.booleans())
@example(Machine(overhead=9, start=12, largest=15, capacity=0), 6, 9, True)
def test_few_sizes_are_tried_all_allowed_and_none_twice(machine, most_probes, smallest, limited):
    smallest = min(smallest, machine.start)
    trials = Trials(machine)
    options = {"smallest": smallest, "most_probes": most_probes} | ({} if limited else {"limit": None})
    found = trials.find(**options)
    assert trials.taken[0] == machine.start
    assert len(set(trials.taken)) == len(trials.taken) <= most_probes
    for samples in trials.taken:
        assert smallest <= samples <= machine.largest
        assert samples < 8 or samples % 8 == 0 or samples in (machine.start, machine.largest)
    assert [probe.samples for probe in found.probes] == [n for n in trials.taken if n in ran(trials)]


def ran(trials):
    return set(trials.taken) - (set(trials.failed) if trials.machine.ends else set())


@given(any_machine, st.integers(1, 8))
def test_the_chosen_size_was_tried_and_fits(machine, most_probes):
    assume(machine.ends or machine.counts)
    trials = Trials(machine)
    found = trials.find(most_probes=most_probes)
    fitting = set(trials.taken) - set(trials.failed)
    assert found.too_large == min(trials.failed, default=None)
    if found.samples is None:
        assert not fitting
        assert found.fits == 0
    else:
        assert found.samples in fitting
        assert max(fitting) <= found.fits <= machine.largest
        assert found.too_large is None or found.fits < found.too_large


@given(st.data(), st.integers(1, 600), st.integers(1, 600), st.integers(0, 5000), st.none() | st.integers(0, 2000))
def test_no_sequence_of_results_makes_it_try_a_size_twice(data, start, more, resident, limit):
    taken = []

    def probe(samples: int) -> Probe | None:
        taken.append(samples)
        answer = st.none() | st.tuples(logarithmic(1e-4, 10), st.none() | st.integers(0, 2000))
        drawn = data.draw(answer)
        return drawn and Probe(samples, *drawn)

    found = find(probe, start=start, largest=start + more, limit=limit, resident=resident)
    assert len(set(taken)) == len(taken) <= 6
    assert found.samples is None or found.samples in taken


def test_the_only_size_allowed_is_tried_once():
    trials = Trials(Machine(overhead=50, start=12, largest=12, capacity=100))
    found = trials.find(smallest=12)
    assert (found.samples, trials.taken, found.fits) == (12, [12], 12)


def test_a_probe_knows_its_rate():
    assert Probe(64, 0.5, None).rate == 128


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"smallest": 0}, "0.*8.*64"),
        ({"smallest": 9}, "9.*8.*64"),
        ({"start": 65}, "1.*65.*64"),
        ({"most_probes": 0}, "most_probes.*0"),
    ],
)
def test_what_cannot_be_asked_is_refused(wrong, facts):
    with pytest.raises(ValueError, match=facts):
        find(lambda _: None, **{"start": 8, "largest": 64, "limit": None} | wrong)


# ---- fastest size ------------------------------------------------------------------------------------------


@given(machines())
def test_times_on_a_line(machine):
    trials = Trials(machine)
    found = trials.find()
    assert machine.rate(found.samples) >= 0.95 * machine.best_rate()
    assert not trials.failed


@given(machines(), st.integers())
def test_times_on_a_line_with_noise(machine, seed):
    found = Trials(replace(machine, noise=0.02), seed).find()
    assert machine.rate(found.samples) >= 0.92 * machine.best_rate()


@given(machines_with_a_cliff())
@example(Machine(overhead=0, start=256, largest=512, capacity=512, cliff=64, dearer=1.5))
@example(Machine(overhead=1, start=16, largest=4096, capacity=4096, cliff=80, dearer=3))
def test_a_cliff(machine):
    found = Trials(machine).find()
    assert machine.rate(found.samples) >= 0.95 * machine.best_rate()


@given(machines(**jagged | {"noise": st.just(0)}))
def test_it_gets_no_slower(machine):
    found = Trials(machine).find()
    assert machine.rate(found.samples) >= (1 - NOISE) ** 2 * machine.rate(machine.start)


@given(machines())
def test_among_equally_fast_sizes_the_nearest_to_the_users_is_chosen(machine):
    found = Trials(machine).find()
    rates = {probe.samples: probe.rate for probe in found.probes}
    best = max(rates.values())
    assume(all(abs(rate / best - (1 - WITHIN)) > 1e-6 for rate in rates.values()))
    ratios = [max(n / machine.start, machine.start / n) for n in rates if rates[n] >= (1 - WITHIN) * best]
    assert max(found.samples / machine.start, machine.start / found.samples) == min(ratios)


@given(machines(noise=st.floats(0, 0.015)), st.floats(0, 0.01), st.integers())
@example(Machine(overhead=0, start=256, largest=4096, capacity=4096, noise=0.015), 0.002, 0)
def test_the_users_size_stays_where_nothing_is_gained(machine, overhead, seed):
    assume(machine.start >= 8)
    machine = replace(machine, overhead=overhead * machine.start)
    assert Trials(machine, seed).find().samples == machine.start


@given(any_machine, st.integers())
@example(Machine(overhead=5, start=8, largest=4096, capacity=4096, cliff=300, dearer=3, noise=0.1), 8)
def test_times_that_fit_no_line_are_chosen_as_measured(machine, seed):
    found = Trials(machine, seed).find()
    rates = {probe.samples: probe.rate for probe in found.probes if machine.fits(probe.samples)}
    assume(found.samples in rates)
    assert rates[found.samples] >= (1 - WITHIN) * (1 - NOISE) / (1 + NOISE) * max(rates.values())


def test_a_third_size_separates_overhead_from_noise_if_no_smaller_one_can():
    trials = Trials(Machine(overhead=0.01, start=1, largest=1000, capacity=1000))
    assert trials.find().samples == 1
    assert trials.taken == [1, 2, 16]


def test_it_goes_up_as_far_as_the_line_promises_but_eightfold_at_most():
    trials = Trials(Machine(overhead=200, start=8, largest=10**6, capacity=10**6))
    found = trials.find()
    assert trials.taken[:4] == [8, 16, 128, 1024]
    assert found.samples >= 1024
    assert max(trials.taken) <= 100 * 200, "where the overhead is a hundredth nothing is left to gain"


def test_it_ends_at_the_knee():
    trials = Trials(Machine(overhead=1, start=64, largest=10**6, capacity=10**6))
    assert trials.find().samples == 64
    assert max(trials.taken) == 128


def test_it_goes_down_where_up_gains_nothing():
    machine = Machine(overhead=1, start=256, largest=4096, capacity=4096, cliff=100, dearer=2)
    trials = Trials(machine)
    found = trials.find()
    assert trials.taken[:3] == [256, 512, 32]
    assert 32 <= found.samples < 100


def test_it_narrows_down_where_a_cliff_was_jumped_over():
    machine = Machine(overhead=40, start=16, largest=10**5, capacity=10**5, cliff=200, dearer=2)
    trials = Trials(machine)
    found = trials.find()
    assert trials.taken[:3] == [16, 32, 256]
    assert all(32 < n < 256 for n in trials.taken[3:])
    assert 150 <= found.samples < 200


def test_half_of_a_size_that_cannot_be_doubled_shows_the_overhead():
    trials = Trials(Machine(overhead=64, start=64, largest=100, capacity=100))
    assert trials.find().samples == 100
    assert trials.taken == [64, 32, 100]


# ---- largest size that fits --------------------------------------------------------------------------------


@given(machines(bend=st.integers(1, 1000)), st.booleans())
def test_memory_on_a_parabola_ends_once_at_most(machine, ends):
    trials = Trials(replace(machine, ends=ends))
    trials.find()
    assert len(trials.failed) <= 1
    assert trials.failed in ([], trials.taken[1:2]), "three points are enough to know a parabola"


@given(machines(logarithmic(0.01, 0.999), bend=st.integers(0, 1000), ends=st.just(False)))
def test_a_start_that_is_counted_to_be_too_large_is_the_only_failure(machine):
    assume(machine.fits(1) and not machine.fits(machine.start))
    trials = Trials(machine)
    assert trials.find().samples is not None
    assert trials.failed == [machine.start]


@given(machines(logarithmic(1 / 8, 0.999), bend=st.integers(0, 1000)))
@example(Machine(overhead=10, start=512, largest=512, capacity=3000, bend=100))
def test_a_start_for_which_memory_ends_is_followed_by_an_eighth(machine):
    assume(machine.fits(max(1, machine.start // 8)) and not machine.fits(machine.start))
    trials = Trials(machine)
    found = trials.find()
    assert trials.taken[1] <= max(1, machine.start / 8)
    assert trials.failed == [machine.start]
    assert machine.fits(found.fits)


def test_the_room_below_a_start_that_is_counted_to_be_too_large_is_used():
    trials = Trials(Machine(overhead=10**6, start=1000, largest=1000, capacity=500, ends=False))
    found = trials.find()
    assert trials.failed == [1000]
    assert found.samples >= 0.97 * 500


def test_the_range_below_a_size_that_was_too_large_is_used_up_to_the_predicted_limit():
    taken = []

    def probe(samples: int) -> Probe:
        taken.append(samples)
        return Probe(samples, 10_000 + samples, 1000 * samples + 3000 * max(0, samples - 256))

    found = find(probe, start=64, largest=4096, limit=400_000)
    assert taken[:4] == [64, 128, 392, 224]
    assert (found.samples, found.too_large) == (288, 392)


def test_memory_that_ends_below_the_limit_ends_once():
    trials = Trials(Machine(overhead=10**4, start=64, largest=4096, capacity=100))
    found = trials.find(limit=10**9)
    assert trials.failed == [128]
    assert (found.samples, found.fits) == (64, 64)


@given(machines(), st.floats(0.3, 2), st.booleans())
def test_memory_that_grows_steadily_ends_once_at_most(machine, power, ends):
    failed = []

    def taken(samples: int) -> int:
        return machine.resident + round(SLOPE * samples**power)

    def probe(samples: int) -> Probe | None:
        fits = taken(samples) <= taken(machine.capacity)
        failed.extend([] if fits else [samples])
        return Probe(samples, float(machine.seconds(samples)), taken(samples)) if fits or not ends else None

    limit, question = taken(machine.capacity), {"start": machine.start, "largest": machine.largest}
    find(probe, limit=limit, resident=machine.resident, **question)
    assert len(failed) <= 1


@given(machines(), st.data(), st.booleans())
def test_without_known_bytes_it_only_doubles_until_memory_runs_out(machine, data, limited):
    capacity = data.draw(st.integers(machine.start, machine.largest))
    machine = replace(machine, capacity=capacity, counts=not limited)
    trials = Trials(machine)
    found = trials.find(**({} if limited else {"limit": None}))
    for i in range(1, len(trials.taken)):
        assert trials.taken[i] <= 2 * max(trials.taken[:i])
    assert len(trials.failed) <= 1
    if trials.failed:
        later = trials.taken[trials.taken.index(trials.failed[0]) + 1 :]
        assert max(later, default=1) <= found.fits <= capacity, "above what fitted nothing is known to fit"
    else:
        assert found.fits == machine.largest


def test_memory_is_used_up_to_the_last_eight_samples():
    trials = Trials(Machine(overhead=10**6, start=8, largest=10**6, capacity=1234))
    found = trials.find()
    assert (found.samples, found.fits, trials.failed) == (1232, 1234, [])


def test_the_line_that_predicts_more_memory_counts():
    """An allocation outside ``resident`` makes the finder cautious: 500 samples would fit."""
    taken = []

    def probe(samples: int) -> Probe:
        taken.append(samples)
        return Probe(samples, 1.0, 5000 + 10 * samples)

    find(probe, start=100, largest=10**6, limit=10_000, resident=0)
    assert taken == [100, 56, 160, 240, 320, 384]


def test_if_nothing_fits_the_smallest_size_is_tried_last():
    trials = Trials(Machine(overhead=1, start=10**6, largest=10**6, capacity=0))
    found = trials.find()
    assert trials.taken == [10**6, 125_000, 1952, 3, 1]
    assert (found.samples, found.probes, found.too_large, found.fits) == (None, (), 1, 0)


@pytest.mark.parametrize("most_probes", [2, 3, 4])
def test_the_last_probe_is_of_the_smallest_where_nothing_fitted(most_probes):
    trials = Trials(Machine(overhead=1, start=10**6, largest=10**6, capacity=0))
    trials.find(most_probes=most_probes, smallest=3)
    assert len(trials.taken) == most_probes
    assert trials.taken[-1] == 3


# ---- reasons -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "options", "rates", "codes"),
    [
        ({"overhead": 1, "start": 64}, {}, {8: 889, 64: 985, 128: 992}, {"larger-gains-little"}),
        ({"overhead": 64, "start": 64, "largest": 128}, {}, {64: 500, 128: 667}, {"larger-not-allowed"}),
        (
            {"overhead": 64, "start": 64, "capacity": 150},
            {},
            {64: 500, 128: 667, 144: 692},
            {"larger-does-not-fit"},
        ),
        (
            {"overhead": 64, "start": 64, "capacity": 40},
            {},
            {8: 111, 16: 200, 32: 333},
            {"larger-does-not-fit", "size-did-not-fit"},
        ),
        (
            {"overhead": 0, "start": 16, "cliff": 8, "dearer": 2},
            {},
            {1: 1000, 2: 1000, 16: 500, 32: 500},
            {"larger-is-slower"},
        ),
        ({"overhead": 64, "start": 64}, {"most_probes": 1}, {64: 500}, {"larger-untried"}),
        ({"overhead": 64, "start": 8}, {"most_probes": 2}, {8: 111, 16: 200}, {"larger-untried"}),
        ({"overhead": 1, "start": 9, "capacity": 0}, {}, {}, {"nothing-fits"}),
    ],
)
def test_the_reason_is_what_bounds_the_choice_and_names_the_rates(question, options, rates, codes):
    trials = Trials(Machine(**{"capacity": 10_000, "largest": 10_000} | question))
    found = trials.find(**options)
    assert {probe.samples: round(probe.rate) for probe in found.probes} == rates
    assert bounds(found.reason) == codes
    assert found.too_large == min(trials.failed, default=None)
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\b", found.reason)]
    assert numbers[: 2 * len(rates)] == [number for pair in rates.items() for number in pair]


def test_a_tie_that_only_noise_makes_goes_to_the_size_that_the_line_has_faster():
    """Measured rates of a large update on a busy machine. The rate for 1,328 samples is too high by chance."""
    rates = {64: 256, 128: 644, 304: 1069, 664: 2182, 1328: 3178, 1936: 3192}

    def probe(samples: int) -> Probe:
        times = [size / rate for size, rate in rates.items()]
        return Probe(samples, float(np.interp(samples, list(rates), times)), samples)

    found = find(probe, start=64, largest=1936, limit=10**6)
    assert found.samples == 1936

"""tune: what is chosen, decided on modelled loaders; what it leaves alone, sees and refuses, on real ones."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from flatout.data import Prefetcher, clone_loader, machine, tune
from flatout.data.trials import Trials, Try
from flatout.data.tuning import _Search

MODULE = "flatout.data.tuning."
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Clock:
    """Time that passes only in models."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Modelled:
    """Loaders of a model: a batch takes so long, keeps so much of a core busy, and what cores there are is shared.

    A worker's start takes ``start`` seconds, and ``receive`` seconds of the training process go into every batch that
    comes from one. Each ``bursts[0]``-th batch takes ``bursts[1]`` times as long as the others.
    """

    def __init__(self, clock, seconds, busy, cores, start=0.02, receive=0.0, bursts=(1, 1.0), batch_bytes=1000):
        self.clock, self.busy, self.cores, self.start, self.receive = clock, busy, cores, start, receive
        every, factor = bursts
        self.times = [seconds * factor] + [seconds] * (every - 1)
        self.batch_bytes, self.device, self.start_method = batch_bytes, None, None

    @property
    def mean(self):
        return sum(self.times) / len(self.times)

    def rate(self, workers):
        at_once = min(workers, self.cores / self.busy) if self.busy else workers
        return min(at_once / self.mean, 1 / self.receive if self.receive else math.inf)

    def alone(self):
        self.clock.now += self.mean + max(0.25, self.mean)
        return Try(0, 1 / self.mean, self.mean)

    def with_workers(self, workers):
        rate = self.rate(workers)
        self.clock.now += 2 * workers * self.start + self.mean + 2 * workers / rate + max(0.25, workers / rate)
        return Try(workers, rate, workers * self.start + self.mean)

    def paced(self, workers, prefetch_factor, step_time, fill, at_least):
        asked, ready, waited = [0.0] * workers * prefetch_factor, [], 0.0
        first = now = self.times[0] + fill
        for k in itertools.count():
            if k > at_least and now >= first + 0.75:
                break
            begun = max(asked[k], ready[k - workers] if k >= workers else 0.0)
            ready.append(begun + self.times[k % len(self.times)])
            if k:
                now += step_time
                took = max(self.receive, ready[k] - now)
                now, waited = now + took, waited + took
            asked.append(now)
        self.clock.now += workers * self.start + now
        return waited / (now - first)

    def start_otherwise(self, error):
        return False


@pytest.fixture(autouse=True)
def much_memory(monkeypatch):
    monkeypatch.setattr(MODULE + "available_memory", lambda: 2**50)
    monkeypatch.setattr(MODULE + "free_shared_memory", lambda: 2**50)


def searched(monkeypatch, seconds, busy, step, cores=8, budget=3.0, kind=Modelled, model=None, dataset=None, **options):
    clock = Clock()
    monkeypatch.setattr(MODULE + "time", clock)
    monkeypatch.setattr(MODULE + "usable_cores", lambda: cores)
    trials = kind(clock, seconds, busy, cores, **(model or {}))
    loader = DataLoader(dataset or TensorDataset(torch.zeros(1000)), 10, **options)
    return _Search(trials, loader, step, budget).run()


# -- how many workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "busy", "step", "workers"),
    [
        (0.0001, 1.0, 0.1, 0),  # nothing to hide
        (0.004, 1.0, 0.1, 0),
        (0.01, 1.0, 0.1, 1),
        (0.09, 1.0, 0.1, 1),
        (0.25, 1.0, 0.1, 3),
        (0.5, 0.0, 0.1, 6),  # the starved step
        (2.0, 0.0, 0.1, 22),  # more than cores: they wait for a disk
        (2.0, 1.0, 0.1, 8),  # all that the cores carry
        (2.0, 0.5, 0.1, 16),
        (100.0, 0.0, 0.01, 64),
        (0.1, 1.0, 0.0, 8),  # as fast as can be
    ],
)
def test_the_fewest_that_keep_up(monkeypatch, seconds, busy, step, workers):
    found = searched(monkeypatch, seconds, busy, step)
    assert found.workers == workers
    assert found.loader.num_workers == workers


class Scaling(Modelled):
    """Workers that bring less and less: the square root of their number."""

    def rate(self, workers):
        return math.sqrt(workers) / self.mean


@pytest.mark.parametrize(("step", "workers"), [(0.05, 4), (0.04, 7), (0.1, 2)])
def test_more_are_tried_than_were_guessed(monkeypatch, step, workers):
    found = searched(monkeypatch, 0.1, 0.0, step, budget=10.0, kind=Scaling)
    assert found.workers == workers
    assert [tried.workers for tried in found.tries][:2] == [0, math.ceil(1.1 * 0.1 / step)]


@settings(max_examples=300, deadline=None)
@given(
    seconds=st.floats(1e-5, 5),
    busy=st.floats(0, 1),
    step=st.one_of(st.just(0.0), st.floats(1e-4, 2)),
    cores=st.integers(1, 64),
    receive=st.one_of(st.just(0.0), st.floats(1e-5, 0.01)),
)
def test_never_slower_than_without_and_never_far_from_the_best(seconds, busy, step, cores, receive):
    with pytest.MonkeyPatch.context() as patch:
        found = searched(patch, seconds, busy, step, cores, model={"receive": receive})
        model = Modelled(Clock(), seconds, busy, cores, receive=receive)

        def pace(workers):
            """Of a training loop: a step cannot begin while its batch is received."""
            return 1 / (seconds + step) if workers == 0 else 1 / max(1 / model.rate(workers), step + receive)

        without = pace(0)
        if receive < seconds or found.stall is not None:
            assert pace(found.workers) >= 0.95 * without
        bound = max(1, min(64, max(cores, int(cores / busy) if busy > 1e-3 else 64)))
        if step and receive == 0:
            assert pace(found.workers) >= 0.9 * max(map(pace, range(bound + 1)))
        assert found.workers <= max(bound, cores)


def test_receiving_a_batch_can_take_longer_than_making_it(monkeypatch):
    found = searched(monkeypatch, 0.001, 1.0, 0.005, model={"receive": 0.002})
    assert (found.workers, found.loader.num_workers) == (0, 0)
    assert [tried.workers for tried in found.tries] == [0, 1]
    assert "no number of workers tried does better" in found.reason


class ColdFirst(Modelled):
    """Files that are in memory once they were read."""

    times_alone = 0

    def alone(self):
        self.times_alone += 1
        self.clock.now += 0.3
        return Try(0, 10.0 if self.times_alone == 1 else 100.0, 0.1)


def test_fewer_are_tried_than_were_guessed(monkeypatch):
    found = searched(monkeypatch, 0.01, 0.0, 0.02, kind=ColdFirst)
    assert [tried.workers for tried in found.tries] == [0, 6, 1]
    assert found.workers == 1


def test_loading_alone_gets_a_second_chance(monkeypatch):
    assert searched(monkeypatch, 0.02, 1.0, 0.0, cores=1, kind=ColdFirst).workers == 0
    assert searched(monkeypatch, 0.005, 1.0, 0.0, cores=1, kind=ColdFirst).workers == 1


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.floats(1e-5, 0.02),
    step=st.one_of(st.just(0.0), st.floats(1e-4, 0.1)),
    busy=st.floats(0, 1),
    receive=st.floats(0, 0.002),
)
def test_cheap_data_is_tuned_within_the_budget(seconds, step, busy, receive):
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(MODULE + "time", clock)
        patch.setattr(MODULE + "usable_cores", lambda: 8)
        trials = Modelled(clock, seconds, busy, 8, receive=receive)
        found = _Search(trials, DataLoader(TensorDataset(torch.zeros(1000)), 10), step, 3.0).run()
    first = next((tried.workers for tried in found.tries if tried.workers), 0)
    assert clock.now <= max(3.03, 1.0 + 2 * first * trials.start)  # many workers take what it takes to start them
    assert len(found.tries) <= 8


def test_a_slow_dataset_is_tried_with_one_number_of_workers(monkeypatch):
    assert len(searched(monkeypatch, 3.0, 1.0, 0.1).tries) == 2
    assert len(searched(monkeypatch, 0.1, 1.0, 0.01, budget=0.0).tries) == 2


# -- what bounds them ----------------------------------------------------------------------------------------


def test_workers_beyond_the_cores_are_taken_back(monkeypatch):
    found = searched(monkeypatch, 0.2, 1.0, 0.03, num_workers=32)
    assert found.workers == 8
    assert "32 workers are more than this machine can serve: each keeps 100% of a core busy, and there are 8" in (
        found.reason
    )


def test_workers_beyond_the_need_are_taken_back(monkeypatch):
    found = searched(monkeypatch, 0.2, 0.0, 0.1, num_workers=32)
    assert found.workers == 3
    assert "32 workers are more than that takes" in found.reason


def test_shared_memory_bounds_workers(monkeypatch):
    monkeypatch.setattr(MODULE + "free_shared_memory", lambda: 16_000)  # half of it: 8 batches of 1,000 bytes
    found = searched(monkeypatch, 2.0, 0.0, 0.1, num_workers=16)
    assert found.workers == 3  # two batches ahead each, one in use and one handed over
    assert "MiB of /dev/shm are free" in found.reason
    monkeypatch.setattr(MODULE + "free_shared_memory", lambda: 7_000)
    found = searched(monkeypatch, 2.0, 0.0, 2.0)
    assert found.workers == 0
    assert "cannot serve one worker" in found.reason


def test_memory_bounds_workers(monkeypatch):
    monkeypatch.setattr(MODULE + "available_memory", lambda: 5 * 2**30)  # half of it: 9 workers of 256 MiB
    found = searched(monkeypatch, 2.0, 0.0, 0.1, num_workers=16)
    assert found.workers == 9
    assert "of memory are free" in found.reason


class Fat(Modelled):
    def with_workers(self, workers):
        tried = super().with_workers(workers)
        return Try(workers, tried.batches_per_second / 2, tried.start_seconds, 2**30)


def test_the_memory_of_workers_is_measured(monkeypatch):
    monkeypatch.setattr(MODULE + "available_memory", lambda: 10 * 2**30)  # half of it: 4 of these
    found = searched(monkeypatch, 0.05, 0.0, 0.02, kind=Fat)
    assert [tried.workers for tried in found.tries] == [0, 3, 4]


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """A machine whose files are written by a test: 8 hardware threads, two to a core."""
    for name in ("_CGROUP", "_CPUS", "_PROC", "SHARED_MEMORY"):
        monkeypatch.setattr(f"flatout.data.machine.{name}", tmp_path / name)
    monkeypatch.setattr("flatout.data.machine.os.sched_getaffinity", lambda _: range(8))
    write(
        tmp_path / "_CPUS",
        {f"cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)},
    )
    write(tmp_path / "_PROC", {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB", "self/cgroup": "0::/"})
    return tmp_path


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu.max": "max 100000"}, "0::/", 4),
        ({"cpu.max": "150000 100000"}, "0::/", 2),
        ({"cpu.max": "50000 100000"}, "0::/", 1),
        ({"cpu.max": "300000 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 2),
        ({"cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, "0::/elsewhere", 3),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/\n0::/", 3),
        ({"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/x\n0::/", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "0::/", 4),
        ({}, "", 4),
    ],
)
def test_cores_are_counted_within_a_containers_quota(made_up, files, own, cores):
    write(made_up / "_CGROUP", files)
    write(made_up / "_PROC", {"self/cgroup": own})
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(("allowed", "cores"), [([0], 1), ([0, 4], 1), ([0, 1], 2), (range(8), 4)])
def test_cores_are_counted_within_the_affinity(made_up, monkeypatch, allowed, cores):
    monkeypatch.setattr("flatout.data.machine.os.sched_getaffinity", lambda _: allowed)
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "own", "left"),
    [
        ({}, "0::/", 8000 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, "0::/", 8000 * 1024),
        ({"memory.max": "4096", "memory.current": "1096"}, "0::/", 3000),
        ({"memory.max": "4096", "memory.current": "9999"}, "0::/", 0),
        (
            {"memory.max": "4096", "memory.current": "4096", "memory.stat": "anon 96\ninactive_file 4000"},
            "0::/",
            4000,
        ),  # files that were read give way
        ({"a/memory.max": "4096", "a/memory.current": "96"}, "0::/a/b", 4000),
        (
            {
                "memory/x/memory.limit_in_bytes": "4096",
                "memory/x/memory.usage_in_bytes": "2096",
                "memory/x/memory.stat": "cache 9\ntotal_inactive_file 1000",
            },
            "4:memory:/x",
            3000,
        ),
    ],
)
def test_memory_is_what_the_container_has_left(made_up, files, own, left):
    write(made_up / "_CGROUP", files)
    write(made_up / "_PROC", {"self/cgroup": own})
    assert machine.available_memory() == left


def test_memory_of_a_process_is_what_it_has_for_itself(made_up):
    write(made_up / "_PROC", {"7/smaps_rollup": "Rss: 900 kB\nPrivate_Clean: 1 kB\nPrivate_Dirty:   2 kB"})
    assert machine.private_memory(7) == 3072
    assert machine.private_memory(8) == 0


def test_shared_memory_without_a_limit(made_up):
    assert machine.free_shared_memory() == math.inf
    (made_up / "SHARED_MEMORY").mkdir()
    assert 0 < machine.free_shared_memory() < math.inf


def test_a_wait_is_not_taken_for_work():
    had, begin = machine.wanted_core_seconds(), time.perf_counter()
    time.sleep(0.2)
    slept = machine.wanted_core_seconds() - had
    while time.perf_counter() < begin + 0.4:
        pass
    assert slept < 0.1 < machine.wanted_core_seconds() - had - slept


# -- how many batches ahead ----------------------------------------------------------------------------------


def test_more_are_made_ahead_where_batch_times_vary(monkeypatch):
    bursty = {"bursts": (20, 20.0)}  # 80 ms once in 20 batches
    found = searched(monkeypatch, 0.004, 0.0, 0.01, budget=5.0, model=bursty)
    assert (found.workers, found.prefetch_factor, found.loader.prefetch_factor) == (1, 8, 8)
    assert found.stall < 0.05
    assert "1 worker loads 128.2 batches/s, as a step needs (100.0/s at 10.00 ms)" in found.reason
    assert "each is 8 batches ahead, because batch times vary" in found.reason


def test_the_fewest_ahead_that_do(monkeypatch):
    for factor, ahead in ((5, 2), (11, 4)):
        found = searched(monkeypatch, 0.004, 0.0, 0.01, budget=5.0, model={"bursts": (20, factor)})
        assert (found.workers, found.prefetch_factor) == (1, ahead)
        assert found.stall < 0.05


def test_more_ahead_is_not_kept_where_it_does_not_help(monkeypatch):
    found = searched(monkeypatch, 0.05, 0.0, 0.02, budget=30.0, model={"receive": 0.004})
    assert (found.workers, found.prefetch_factor) == (3, 2)
    assert found.stall == pytest.approx(1 / 6)  # it is receiving that takes this long


def test_batches_ahead_are_bounded_by_shared_memory(monkeypatch):
    bursty = {"bursts": (20, 20.0)}
    monkeypatch.setattr(MODULE + "free_shared_memory", lambda: 15_000)  # half of it: 5 batches ahead, two beside
    found = searched(monkeypatch, 0.004, 0.0, 0.01, budget=5.0, model=bursty)
    assert (found.workers, found.prefetch_factor) == (1, 4)
    found = searched(monkeypatch, 0.004, 0.0, 0.01, model=bursty, num_workers=1, prefetch_factor=50)
    assert (found.workers, found.prefetch_factor) == (1, 5)


def test_the_users_own_depth_is_where_it_begins(monkeypatch):
    found = searched(monkeypatch, 0.05, 0.0, 0.06, num_workers=1, prefetch_factor=16)
    assert found.loader.prefetch_factor == 16
    assert "ahead" not in found.reason


@pytest.mark.parametrize(("seconds", "step", "workers"), [(0.001, 0.1, 0), (0.1, 0.0, 8), (5.0, 0.1, 8)])
def test_no_pace_where_there_is_none_or_no_time(monkeypatch, seconds, step, workers):
    monkeypatch.setattr(Modelled, "paced", lambda *_: pytest.fail("nothing to gain"))
    found = searched(monkeypatch, seconds, 1.0, step)
    assert found.workers == workers
    assert found.prefetch_factor == (2 if workers else None)


# -- how they start and end ----------------------------------------------------------------------------------


def test_workers_live_on_where_starting_them_shows(monkeypatch):
    assert searched(monkeypatch, 0.05, 1.0, 0.01).persistent  # 0.1 s of 100 batches in 1 s
    few = TensorDataset(torch.zeros(100))
    assert not searched(monkeypatch, 1.0, 0.0, 0.5, dataset=few).persistent  # most of a start is the first batch
    assert searched(monkeypatch, 1.0, 0.0, 0.5, num_workers=1, persistent_workers=True).persistent

    class Changing(TensorDataset):
        def set_epoch(self, epoch):
            pass

    assert not searched(monkeypatch, 0.05, 1.0, 0.01, dataset=Changing(torch.zeros(1000))).persistent


class OnlyAtHome(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("not in a worker\nat all")
        return torch.zeros(3)


def test_workers_that_fail_are_none():
    loader = DataLoader(OnlyAtHome(), 4)
    found = tune(loader, 0.0)
    assert (found.workers, found.loader) == (0, loader)
    assert "2 workers failed with RuntimeError: not in a worker" in found.reason.replace("1 worker ", "2 workers ")


class Slow(Dataset):
    """Each sample waits, in whatever process; optionally it cannot be pickled."""

    def __init__(self, seconds, size=512, at_home=None):
        self.seconds, self.size = seconds, size
        if at_home is not None:
            self.at_home = at_home

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((3,), float(index))


@pytest.fixture
def spawning(monkeypatch):
    """A platform whose default is to spawn, and a user who has left it at that."""
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn", "fork"])
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawning")
def test_what_cannot_be_pickled_is_forked():
    found = tune(DataLoader(Slow(0.02, at_home=lambda: 0), 4), 0.05)
    assert found.workers > 0
    assert found.start_method == "fork"
    assert found.settings["multiprocessing_context"] == "fork"
    assert found.loader.multiprocessing_context.get_start_method() == "fork"
    assert "so workers are started by fork" in found.reason
    assert len(list(found.loader)) == 128


@pytest.mark.usefixtures("spawning")
def test_the_users_own_start_method_is_kept(monkeypatch):
    loader = DataLoader(Slow(0.02, at_home=lambda: 0), 4, num_workers=1, multiprocessing_context="spawn")
    found = tune(loader, 0.05)
    assert found.workers == 0
    assert "failed with" in found.reason
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["fork", "spawn"])  # spawn is their wish now
    assert tune(DataLoader(Slow(0.02, at_home=lambda: 0), 4), 0.05).workers == 0


class OnMeta(Dataset):
    """On a device that is not the CPU, wherever this runs."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(3, device="meta")


def test_batches_on_a_device_are_left_to_this_process():
    found = tune(DataLoader(OnMeta(), 4), 0.0)
    assert found.workers == 0
    assert "batches are on meta already" in found.reason


# -- no trace ------------------------------------------------------------------------------------------------


class Noisy(Dataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.rand(3, generator=self.generator) + torch.rand(3) + random.random() + np.random.rand()


@pytest.mark.parametrize("step_time", [0.0, 1e-4, 10.0])
def test_a_trial_leaves_no_trace(step_time):
    generator = torch.Generator().manual_seed(5)
    other = torch.Generator().manual_seed(6)
    sampler = WeightedRandomSampler([1.0] * 64, 40, generator=generator)
    loader = DataLoader(Noisy(), 4, sampler=sampler, generator=other)

    def states():
        python, numpy = random.getstate(), np.random.get_state()
        generators = (generator, other, loader.dataset.generator, torch.default_generator)
        return [[g.get_state().tolist() for g in generators], python, [*map(str, numpy)]]

    before = states()
    found = tune(loader, step_time)
    assert states() == before
    assert found.loader.batch_sampler is loader.batch_sampler
    assert found.loader.generator is other
    assert {tried.workers for tried in found.tries} >= {0}
    assert all(tried.batches_per_second > 0 and tried.start_seconds > 0 for tried in found.tries)
    assert not multiprocessing.active_children()


def test_the_users_position_stays():
    loader = DataLoader(TensorDataset(torch.arange(50)), 7, shuffle=True, generator=torch.Generator().manual_seed(1))
    twin = DataLoader(TensorDataset(torch.arange(50)), 7, shuffle=True, generator=torch.Generator().manual_seed(1))
    batches, expected = iter(loader), list(twin)
    seen = [next(batches) for _ in range(3)]
    tune(loader, 1e-6)
    assert [b[0].tolist() for b in [*seen, *batches]] == [b[0].tolist() for b in expected]


def test_batches_are_the_loaders():
    data = TensorDataset(torch.arange(50))
    loaders = [DataLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    found = tune(loaders[0], 1e-6)
    for ours, theirs in zip(found.loader, loaders[1], strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_an_own_list_of_batches():
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_sampler=[[1, 2], [3]])
    assert [batch[0].tolist() for batch in tune(loader, 1e-6).loader] == [[1, 2], [3]]


class HalfBroken(TensorDataset):
    """Only what the sampler names can be read."""

    def __getitem__(self, index):
        assert index < 25
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(range(25)), "batch_size": 4},
        {"sampler": range(25), "batch_size": None},
        {"batch_sampler": BatchSampler(range(25), 4, False)},
    ],
    ids=["subset", "no batching", "batch sampler"],
)
def test_trials_read_what_the_sampler_names(options):
    loader = DataLoader(HalfBroken(torch.arange(50)), **options)
    found = tune(loader, 0.0)
    assert len(found.tries) > 1
    assert sorted(torch.cat([b[0].flatten() for b in found.loader]).tolist()) == list(range(25))


def test_trials_go_on_where_the_last_one_ended():
    trials = Trials(DataLoader(Slow(0.05, size=10_000), 1))
    seen = [next(trials._indices) for _ in range(3)]
    trials.alone()
    assert seen == [[0], [1], [2]]
    assert next(trials._indices)[0] > 4


# -- the whole -----------------------------------------------------------------------------------------------


def stall(loader, step_time, batches):
    """Share of the time that steps of this length wait, behind the first batch."""
    prefetcher = Prefetcher(loader, "cpu")
    for i, _ in zip(range(batches), prefetcher, strict=False):
        if i == 0:
            prefetcher.reset_stall()
        time.sleep(step_time)
    return prefetcher.stall_seconds / (prefetcher.stall_seconds + prefetcher.batches * step_time)


@pytest.mark.slow
def test_a_starved_step_is_fed():
    loader = DataLoader(Slow(0.4, size=60), batch_size=1)
    found = tune(loader, 0.08)
    assert found.stall_without_workers > 0.7  # 5 / 6 of the time; a busy machine wakes sleepers late
    assert found.workers >= 5
    assert stall(found.loader, 0.08, batches=50) < 0.4  # benchmarks/tuner.py has the figure of an idle machine


def test_settings_make_the_same_loader_and_fit_a_file():
    loader = DataLoader(Slow(0.02), 1)
    found = tune(loader, 0.01)
    assert found.workers
    again = clone_loader(loader, **json.loads(json.dumps(found.settings)))
    for name in ("num_workers", "prefetch_factor", "persistent_workers"):
        assert getattr(again, name) == getattr(found.loader, name) == found.settings[name]
    assert found.start_seconds == next(t.start_seconds for t in found.tries if t.workers == found.workers)


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("samples of a stream would be lost")


class Own(Sampler):
    def __iter__(self):
        raise AssertionError("its position would be lost")

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Stream()), DataLoader(torch.zeros(3), sampler=Own()), [torch.zeros(3)]],
    ids=["a stream", "a sampler", "a list"],
)
def test_what_trials_would_use_up_is_refused(loader):
    with pytest.raises(ValueError, match="loader must be a DataLoader that trials can iterate"):
        tune(loader, 0.1)


def test_an_empty_loader_is_refused():
    with pytest.raises(ValueError, match="loader must have a batch"):
        tune(DataLoader(torch.zeros(3), batch_size=4, drop_last=True), 0.1)


@pytest.mark.parametrize(("step_time", "budget"), [(-1.0, 1.0), (float("nan"), 1.0), (1.0, -1.0)])
def test_arguments_are_checked(step_time, budget):
    with pytest.raises(ValueError, match="step_time and budget must be >= 0"):
        tune(DataLoader(torch.zeros(3)), step_time, budget=budget)


class HangsInWorkers(Dataset):
    """As a lock does that another thread held when the worker was forked."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if get_worker_info() is not None:
            time.sleep(1000)
        time.sleep(0.002)
        return index


@pytest.mark.slow
def test_workers_that_hang_are_not_waited_for(monkeypatch):
    monkeypatch.setattr("flatout.data.trials._PATIENCE", (2.0, 1))
    # What torch gives each worker to end in by itself, which these never do: five seconds.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    tuned = tune(DataLoader(HangsInWorkers(), 4), 0.001)
    assert tuned.workers == 0
    assert "timed out" in tuned.reason


def test_no_budget_is_too_large_and_no_step_too_short():
    loader = DataLoader(TensorDataset(torch.arange(64)), 4)
    assert tune(loader, 1e-320, budget=0.5).loader is not None

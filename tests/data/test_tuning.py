"""Tests of ``tune``: decisions for modeled loaders, and measurements of real loaders in simulated time."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import re
import threading

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

from flatout.core import machine
from flatout.data import Prefetcher, clone_loader, tune
from flatout.data.rate_trials import Try
from tests.data.harness import (
    TICK,
    MachineFiles,
    ModelledLoader,
    SlowSamples,
    impatient_trials,
    simulated_machine,
    started_by,
    tune_modelled,
)
from tests.reasons import reasons

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def tried(found) -> list[int]:
    return [each.workers for each in found.tries]


# -- how many workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "busy", "step", "workers"),
    [
        (0.0001, 1.0, 0.1, 0),  # no time to hide
        (0.004, 1.0, 0.1, 0),
        (0.01, 1.0, 0.1, 1),
        (0.09, 1.0, 0.1, 1),
        (0.25, 1.0, 0.1, 3),
        (0.5, 0.0, 0.1, 6),  # the starved step
        (2.0, 0.0, 0.1, 22),  # more workers than cores: they wait for a disk
        (2.0, 1.0, 0.1, 8),  # the number that the cores support
        (2.0, 0.5, 0.1, 16),
        (100.0, 0.0, 0.01, 64),
        (0.1, 1.0, 0.0, 8),  # as fast as possible
    ],
)
def test_fewest_workers_that_keep_up(seconds, busy, step, workers):
    found = tune_modelled(ModelledLoader(seconds, busy), step)
    assert found.workers == workers
    assert found.loader.num_workers == workers


def test_workers_feed_a_starved_step():
    found = tune_modelled(ModelledLoader(0.4, cores=1), 0.08, budget=10.0)
    assert found.stall_without_workers == pytest.approx(5 / 6)
    assert (tried(found), found.workers) == ([0, 6], 6)
    assert found.stall == 0
    assert {"loader-keeps-up"} <= reasons(found.reason)


def test_workers_on_too_few_cores_reduce_the_stall():
    found = tune_modelled(ModelledLoader(0.4, busy=1.0, cores=2), 0.08, budget=10.0)
    assert found.stall_without_workers == pytest.approx(5 / 6)
    assert found.workers == 2
    assert found.stall == pytest.approx(7 / 15)  # less than the 0.6 of a long run, because the queue starts full
    assert {"loader-limited"} <= reasons(found.reason)


def test_negligible_loading_gets_no_workers():
    found = tune_modelled(ModelledLoader(0.004), 0.1)
    assert (tried(found), found.workers) == ([0], 0)
    assert {"loading-negligible"} <= reasons(found.reason)


class Scaling(ModelledLoader):
    """Loader whose rate grows with the square root of the number of workers."""

    def rate(self, workers):
        return math.sqrt(workers) / self.mean


@pytest.mark.parametrize(("step", "workers"), [(0.05, 4), (0.04, 7), (0.1, 2)])
def test_trials_of_more_workers_than_the_first_guess(step, workers):
    found = tune_modelled(Scaling(0.1), step, budget=10.0)
    assert found.workers == workers
    assert tried(found)[:2] == [0, math.ceil(1.1 * 0.1 / step)]


@settings(max_examples=300, deadline=None)
@given(
    seconds=st.floats(1e-5, 5),
    busy=st.floats(0, 1),
    step=st.one_of(st.just(0.0), st.floats(1e-4, 2)),
    cores=st.integers(1, 64),
    receive=st.one_of(st.just(0.0), st.floats(1e-5, 0.01)),
)
def test_never_slower_than_without_and_never_far_from_the_best(seconds, busy, step, cores, receive):
    model = ModelledLoader(seconds, busy, cores, receive=receive)
    found = tune_modelled(model, step)

    def pace(workers):
        """Return the steps per second of a training loop. A step begins after the loop has received the batch."""
        return 1 / (seconds + step) if workers == 0 else 1 / max(1 / model.rate(workers), step + receive)

    without = pace(0)
    if receive < seconds or found.stall is not None:
        assert pace(found.workers) >= 0.95 * without
    bound = max(1, min(64, max(cores, int(cores / busy) if busy > 1e-3 else 64)))
    if step and receive == 0:
        assert pace(found.workers) >= 0.9 * max(map(pace, range(bound + 1)))
    assert found.workers <= max(bound, cores)


def test_receiving_a_batch_can_take_longer_than_making_it():
    found = tune_modelled(ModelledLoader(0.001, 1.0, receive=0.002), 0.005)
    assert (found.workers, found.loader.num_workers) == (0, 0)
    assert tried(found) == [0, 1]
    assert {"workers-not-faster"} <= reasons(found.reason)


class ColdFirst(ModelledLoader):
    """Loader of files that the page cache holds after the first read."""

    times_alone = 0

    def alone(self):
        self.times_alone += 1
        self.clock.now += 0.3
        return Try(0, 10.0 if self.times_alone == 1 else 100.0, 0.1)


def test_trials_of_fewer_workers_than_the_first_guess():
    found = tune_modelled(ColdFirst(0.01), 0.02)
    assert tried(found) == [0, 6, 1]
    assert found.workers == 1


def test_loading_without_workers_is_measured_again():
    assert tune_modelled(ColdFirst(0.02, 1.0, cores=1), 0.0).workers == 0
    assert tune_modelled(ColdFirst(0.005, 1.0, cores=1), 0.0).workers == 1


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.floats(1e-5, 0.02),
    step=st.one_of(st.just(0.0), st.floats(1e-4, 0.1)),
    busy=st.floats(0, 1),
    receive=st.floats(0, 0.002),
)
def test_cheap_data_is_tuned_within_the_budget(seconds, step, busy, receive):
    model = ModelledLoader(seconds, busy, receive=receive)
    found = tune_modelled(model, step, budget=3.0)
    first = next((each.workers for each in found.tries if each.workers), 0)
    assert model.clock.now <= max(3.03, 1.0 + 2 * first * model.start)  # starting many workers may take longer
    assert len(found.tries) <= 8


def test_a_slow_dataset_is_tried_with_one_number_of_workers():
    assert len(tune_modelled(ModelledLoader(3.0, 1.0), 0.1).tries) == 2
    assert len(tune_modelled(ModelledLoader(0.1, 1.0), 0.01, budget=0.0).tries) == 2


# -- bounds on workers ----------------------------------------------------------------------------------------


def test_workers_beyond_the_cores_are_removed():
    found = tune_modelled(ModelledLoader(0.2, 1.0), 0.03, num_workers=32)
    assert found.workers == 8
    assert {"more-workers-than-supported", "cores-bound"} <= reasons(found.reason)


def test_workers_beyond_the_need_are_removed():
    found = tune_modelled(ModelledLoader(0.2), 0.1, num_workers=32)
    assert found.workers == 3
    assert "more-workers-than-needed" in reasons(found.reason)


def test_shared_memory_bounds_workers():
    model = ModelledLoader(2.0)
    found = tune_modelled(model, 0.1, shared_memory=16_000, num_workers=16)  # half: 8 batches of 1 kB
    assert found.workers == 3  # two batches ahead each, one in use and one handed over
    assert {"more-workers-than-supported", "shared-memory-bound"} <= reasons(found.reason)
    found = tune_modelled(model, 2.0, shared_memory=7_000)
    assert (found.workers, tried(found)) == (0, [0])
    assert {"no-room-for-workers", "shared-memory-bound"} <= reasons(found.reason)


def test_memory_bounds_workers():
    found = tune_modelled(ModelledLoader(2.0), 0.1, memory=5 * 2**30, num_workers=16)  # half: 9 workers of 256 MiB
    assert found.workers == 9
    assert {"more-workers-than-supported", "memory-bound"} <= reasons(found.reason)


class Fat(ModelledLoader):
    def with_workers(self, workers):
        found = super().with_workers(workers)
        return Try(workers, found.batches_per_second / 2, found.start_seconds, 2**30)


def test_the_memory_of_workers_is_measured():
    found = tune_modelled(Fat(0.05), 0.02, memory=10 * 2**30)  # half of the memory: 4 workers
    assert tried(found) == [0, 3, 4]


@pytest.fixture
def files(tmp_path):
    made_up = MachineFiles(tmp_path)
    with made_up.read():
        yield made_up


@pytest.mark.parametrize(
    ("groups", "own", "cores"),
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
def test_cores_are_counted_within_a_containers_quota(files, groups, own, cores):
    files.write("cgroup", groups)
    files.write("proc", {"self/cgroup": own})
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(("allowed", "cores"), [([0], 1), ([0, 4], 1), ([0, 1], 2), (range(8), 4)])
def test_cores_are_counted_within_the_affinity(files, allowed, cores):
    files.affinity = allowed
    assert machine.usable_cores() == cores


@pytest.mark.parametrize(("ranks", "cores"), [("", 4), ("1", 4), ("2", 2), ("3", 1), ("8", 1)])
def test_ranks_on_one_machine_share_its_cores(files, monkeypatch, ranks, cores):
    files.affinity = range(8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert machine.own_cores() == cores


@pytest.mark.parametrize(
    ("groups", "own", "left"),
    [
        ({}, "0::/", 8000 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, "0::/", 8000 * 1024),
        ({"memory.max": "4096", "memory.current": "1096"}, "0::/", 3000),
        ({"memory.max": "4096", "memory.current": "9999"}, "0::/", 0),
        (
            {"memory.max": "4096", "memory.current": "4096", "memory.stat": "anon 96\ninactive_file 4000"},
            "0::/",
            4000,
        ),  # the page cache counts as available
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
def test_available_memory_of_a_container(files, groups, own, left):
    files.write("cgroup", groups)
    files.write("proc", {"self/cgroup": own})
    assert machine.available_memory() == left


def test_memory_of_a_process_excludes_shared_pages(files):
    files.write("proc", {"7/smaps_rollup": "Rss: 900 kB\nPrivate_Clean: 1 kB\nPrivate_Dirty:   2 kB"})
    assert machine.private_memory(7) == 3072
    assert machine.private_memory(8) == 0


def test_shared_memory_without_a_limit(files):
    assert machine.free_shared_memory() == math.inf
    (files.root / "shm").mkdir()
    assert 0 < machine.free_shared_memory() < math.inf


def test_wanted_time_is_running_time_plus_time_in_the_run_queue(files):
    files.write("proc", {"thread-self/schedstat": "1500000000 250000000 99"})
    assert machine.wanted_core_seconds() == 1.75


def test_wanted_time_without_schedstat(files):
    had = machine.wanted_core_seconds()
    while machine.wanted_core_seconds() == had:  # the loop ends only if work counts
        torch.ones(100).sum()


# -- how many batches ahead ----------------------------------------------------------------------------------


def test_varying_batch_times_raise_the_prefetch_factor():
    bursty = ModelledLoader(0.004, bursts=(20, 20.0))  # every 20th batch takes 80 ms
    found = tune_modelled(bursty, 0.01, budget=5.0)
    assert (found.workers, found.prefetch_factor, found.loader.prefetch_factor) == (1, 8, 8)
    assert found.stall < 0.05
    assert [each.batches_per_second for each in found.tries if each.workers] == [pytest.approx(128.2, rel=1e-3)]
    assert {"loader-keeps-up", "batch-times-vary"} <= reasons(found.reason)


def test_smallest_sufficient_prefetch_factor():
    for factor, ahead in ((5, 2), (11, 4)):
        found = tune_modelled(ModelledLoader(0.004, bursts=(20, factor)), 0.01, budget=5.0)
        assert (found.workers, found.prefetch_factor) == (1, ahead)
        assert found.stall < 0.05


def test_a_larger_prefetch_factor_is_reverted_without_benefit():
    found = tune_modelled(ModelledLoader(0.05, receive=0.004), 0.02, budget=30.0)
    assert (found.workers, found.prefetch_factor) == (3, 2)
    assert found.stall == pytest.approx(1 / 6)  # receiving a batch takes this long


def test_shared_memory_bounds_the_prefetch_factor():
    def bursty():
        return ModelledLoader(0.004, bursts=(20, 20.0))

    room = 15_000  # half: 5 batches ahead and two more
    found = tune_modelled(bursty(), 0.01, budget=5.0, shared_memory=room)
    assert (found.workers, found.prefetch_factor) == (1, 4)
    found = tune_modelled(bursty(), 0.01, shared_memory=room, num_workers=1, prefetch_factor=50)
    assert (found.workers, found.prefetch_factor) == (1, 5)


def test_trials_begin_with_the_users_prefetch_factor():
    found = tune_modelled(ModelledLoader(0.05), 0.06, num_workers=1, prefetch_factor=16)
    assert found.loader.prefetch_factor == 16
    assert "batch-times-vary" not in reasons(found.reason)


class Unpaced(ModelledLoader):
    def paced(self, *_, **__):
        raise AssertionError("nothing to gain from a trial at the step's pace")


@pytest.mark.parametrize(("seconds", "step", "workers"), [(0.001, 0.1, 0), (0.1, 0.0, 8), (5.0, 0.1, 8)])
def test_no_paced_trial_without_workers_or_step_time_or_budget(seconds, step, workers):
    found = tune_modelled(Unpaced(seconds, 1.0), step)
    assert found.workers == workers
    assert found.prefetch_factor == (2 if workers else None)


# -- start and end of workers ----------------------------------------------------------------------------------


def test_workers_persist_if_their_start_takes_a_share_of_an_epoch():
    assert tune_modelled(ModelledLoader(0.05, 1.0), 0.01).persistent  # 0.1 s of 100 batches in 1 s
    few = TensorDataset(torch.zeros(100))
    slow = ModelledLoader(1.0)
    assert not tune_modelled(slow, 0.5, dataset=few).persistent  # the first batch takes most of the start
    assert tune_modelled(slow, 0.5, num_workers=1, persistent_workers=True).persistent

    class Changing(TensorDataset):
        def set_epoch(self, epoch):
            pass

    assert not tune_modelled(ModelledLoader(0.05, 1.0), 0.01, dataset=Changing(torch.zeros(1000))).persistent


class OnlyAtHome(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if get_worker_info() is not None:
            raise RuntimeError("not in a worker\nat all")
        return torch.zeros(3)


def test_workers_that_fail_are_none():
    loader = DataLoader(OnlyAtHome(), 4)
    with simulated_machine(cores=2):
        found = tune(loader, 0.0)
    assert (found.workers, found.loader, tried(found)) == (0, loader, [0])
    assert "workers-failed" in reasons(found.reason)
    assert "RuntimeError: not in a worker" in found.reason
    assert "at all" not in found.reason


def test_workers_fork_if_the_dataset_cannot_be_pickled():
    with simulated_machine(), started_by("spawn", "spawn"):
        found = tune(DataLoader(SlowSamples(0.02, 32, attribute=lambda: 0), 4), 0.05)
        assert found.workers == 1
        assert found.start_method == "fork"
        assert found.settings["multiprocessing_context"] == "fork"
        assert found.loader.multiprocessing_context.get_start_method() == "fork"
        assert {"workers-failed", "start-method-changed"} <= reasons(found.reason)
        assert len(list(found.loader)) == 8


@pytest.mark.parametrize(
    ("default", "options"),
    [("spawn", {"num_workers": 1, "multiprocessing_context": "spawn"}), ("fork", {})],
    ids=["of the loader", "of the process"],
)
def test_the_users_own_start_method_is_kept(default, options):
    with simulated_machine(), started_by(default, "spawn"):
        found = tune(DataLoader(SlowSamples(0.02, attribute=lambda: 0), 4, **options), 0.05)
    assert (found.workers, found.start_method) == (0, None)
    assert "workers-failed" in reasons(found.reason)
    assert "start-method-changed" not in reasons(found.reason)


class OnMeta(Dataset):
    """Dataset of meta tensors, for a device other than the CPU on any machine."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(3, device="meta")


def test_batches_on_a_device_are_left_to_this_process():
    with simulated_machine():
        found = tune(DataLoader(OnMeta(), 4), 0.0)
    assert (found.workers, tried(found)) == (0, [0])
    assert {"batches-on-device"} <= reasons(found.reason)


# -- measurements of trials -------------------------------------------------------------------------------------


def test_loading_without_workers_is_timed_after_its_start():
    with simulated_machine():
        found = tune(DataLoader(SlowSamples(0.1), 4), 100.0)
    (alone,) = found.tries
    assert alone.batches_per_second == pytest.approx(1 / 0.4, rel=10 * TICK)
    assert alone.start_seconds == pytest.approx(0.4, rel=10 * TICK)
    assert found.busy == pytest.approx(0, abs=10 * TICK)
    assert found.stall == pytest.approx(0.4 / 100.4, rel=10 * TICK)


def test_loading_that_never_waits_keeps_a_core_busy():
    with simulated_machine():
        found = tune(DataLoader(TensorDataset(torch.arange(64)), 4), 1.0)
    assert found.busy == pytest.approx(1, abs=0.1)
    assert found.tries[0].batches_per_second == pytest.approx(1 / TICK, rel=0.1)


def test_workers_are_timed_after_their_start_and_at_the_steps_pace():
    with simulated_machine():
        found = tune(DataLoader(SlowSamples(4 * TICK, 64), 1), 5 * TICK)
    assert (tried(found), found.workers) == ([0, 2, 1], 1)
    one = found.tries[2]
    assert one.batches_per_second == pytest.approx(1 / TICK, rel=0.1)
    assert one.start_seconds == pytest.approx(TICK)
    assert one.worker_bytes > 0
    assert found.stall == pytest.approx(1 / 8, rel=0.02)  # the loop waits 1 of the 8 ticks of a step


def test_trials_read_no_sample_twice():
    """A second read of a sample would come from the page cache."""

    class Counted(Dataset):
        def __init__(self):
            self.read = torch.zeros(2_000, dtype=torch.int64).share_memory_()

        def __len__(self):
            return len(self.read)

        def __getitem__(self, index):
            self.read[index] += 1
            return index

    data = Counted()
    with simulated_machine():
        found = tune(DataLoader(data, 1), 2 * TICK)
    assert tried(found) == [0, 1]
    assert int(data.read.max()) == 1
    read = data.read.nonzero().flatten()
    assert len(read) > 150
    assert int(read[-1]) - len(read) < 10  # the order of the sampler, with gaps of prefetched batches


# -- no side effects -----------------------------------------------------------------------------------------


class Noisy(Dataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.rand(3, generator=self.generator) + torch.rand(3) + random.random() + np.random.rand()


@pytest.mark.parametrize(("step_time", "tries"), [(0.0, [0, 2, 1]), (2 * TICK, [0, 1]), (10.0, [0])])
def test_a_trial_leaves_no_trace(step_time, tries):
    generator = torch.Generator().manual_seed(5)
    other = torch.Generator().manual_seed(6)
    sampler = WeightedRandomSampler([1.0] * 64, 40, generator=generator)
    loader = DataLoader(Noisy(), 4, sampler=sampler, generator=other)

    def states():
        python, numpy = random.getstate(), np.random.get_state()
        generators = (generator, other, loader.dataset.generator, torch.default_generator)
        return [[g.get_state().tolist() for g in generators], python, [*map(str, numpy)]]

    before = states()
    with simulated_machine(cores=2):
        found = tune(loader, step_time)
    assert states() == before
    assert found.loader.batch_sampler is loader.batch_sampler
    assert found.loader.generator is other
    assert tried(found) == tries
    assert all(each.batches_per_second > 0 and each.start_seconds > 0 for each in found.tries)
    assert not multiprocessing.active_children()


def test_the_users_position_stays():
    loader = DataLoader(TensorDataset(torch.arange(50)), 7, shuffle=True, generator=torch.Generator().manual_seed(1))
    twin = DataLoader(TensorDataset(torch.arange(50)), 7, shuffle=True, generator=torch.Generator().manual_seed(1))
    batches, expected = iter(loader), list(twin)
    seen = [next(batches) for _ in range(3)]
    with simulated_machine():
        tune(loader, 2 * TICK)
    assert [b[0].tolist() for b in [*seen, *batches]] == [b[0].tolist() for b in expected]


def test_batches_are_the_loaders():
    data = TensorDataset(torch.arange(50))
    loaders = [DataLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    with simulated_machine():
        found = tune(loaders[0], 2 * TICK)
    assert found.workers == 1
    for ours, theirs in zip(found.loader, loaders[1], strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_an_own_list_of_batches():
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_sampler=[[1, 2], [3]])
    with simulated_machine():
        found = tune(loader, 2 * TICK)
    assert [batch[0].tolist() for batch in found.loader] == [[1, 2], [3]]


class HalfBroken(TensorDataset):
    """Dataset that can load only the indices of its sampler."""

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
    with simulated_machine():
        found = tune(loader, 2 * TICK)
    assert tried(found) == [0, 1]
    assert sorted(torch.cat([b[0].flatten() for b in found.loader]).tolist()) == list(range(25))


# -- real loaders --------------------------------------------------------------------------------------------


def test_a_real_loader_is_tuned_and_prefetched():
    """Use the real clock. The assertions hold on a busy machine too."""
    loader = DataLoader(TensorDataset(torch.arange(64)), 4)
    found = tune(loader, 1e-3, budget=0.5)
    assert found.tries[0].workers == 0
    assert found.workers in tried(found)
    assert found.loader.num_workers == found.workers
    prefetcher = Prefetcher(found.loader, "cpu")
    assert torch.equal(torch.cat([batch for (batch,) in prefetcher]), torch.arange(64))
    assert prefetcher.batches == 16


def test_settings_make_the_same_loader_and_fit_a_file():
    loader = DataLoader(SlowSamples(0.02), 1)
    with simulated_machine():
        found = tune(loader, 0.01)
    assert found.workers
    again = clone_loader(loader, **json.loads(json.dumps(found.settings)))
    for name in ("num_workers", "prefetch_factor", "persistent_workers"):
        assert getattr(again, name) == getattr(found.loader, name) == found.settings[name]
    assert found.start_seconds == next(each.start_seconds for each in found.tries if each.workers == found.workers)


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
    with pytest.raises(ValueError, match=r"^loader .*DataLoader"):
        tune(loader, 0.1)


def test_an_empty_loader_is_refused():
    with pytest.raises(ValueError, match=r"^loader .*empty"):
        tune(DataLoader(torch.zeros(3), batch_size=4, drop_last=True), 0.1)


def test_a_worker_init_fn_is_refused():
    with pytest.raises(ValueError, match=r"^loader .*worker_init_fn"):
        tune(DataLoader(torch.zeros(3), num_workers=1, worker_init_fn=print), 0.1)


@pytest.mark.parametrize(("step_time", "budget"), [(-1.0, 1.0), (float("nan"), 1.0), (1.0, -1.0)])
def test_arguments_are_checked(step_time, budget):
    with pytest.raises(ValueError, match=rf"step_time.*budget.*{step_time}.*{budget}"):
        tune(DataLoader(torch.zeros(3)), step_time, budget=budget)


class HangsInWorkers(Dataset):
    """Dataset that hangs in workers, like a lock that another thread held at the fork."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if get_worker_info() is not None:
            threading.Event().wait()
        return index


def test_workers_that_hang_are_not_waited_for():
    """Use the real clock, which ends the wait."""
    with impatient_trials():
        found = tune(DataLoader(HangsInWorkers(), 4), 0.0)
    assert found.workers == 0
    assert {"workers-failed", "worker-timed-out"} <= reasons(found.reason)
    patience = re.search(r"([\d.]+) s", found.reason.partition("timed out")[2])
    assert 0.5 <= float(patience[1]) < 5


def test_no_budget_is_too_large_and_no_step_too_short():
    loader = DataLoader(TensorDataset(torch.arange(64)), 4)
    with simulated_machine():
        assert tune(loader, 1e-320, budget=0.5).loader is not None
        assert tune(loader, 2 * TICK, budget=1e300).loader is not None

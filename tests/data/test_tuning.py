"""tune: how many workers, decided on modelled loaders; what it leaves alone, and what it refuses, on real ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from flatout.data import tune
from flatout.data.machine import usable_cores
from flatout.data.tuning import Try, _Search

MODULE = "flatout.data.tuning."
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Modelled(_Search):
    """Loaders of a model: a batch takes so long, keeps so much of a core busy, and what cores there are is shared."""

    def __init__(self, loader, step_time, seconds, busy, cores, budget=3.0):
        super().__init__(loader, step_time, budget)
        self.seconds, self.busy, self.cores = seconds, busy, cores

    def _alone(self):
        self._tries[0] = Try(0, 1 / self.seconds, self.seconds)
        return self._tries[0], self.busy, 1000

    def _try(self, workers):
        at_once = min(workers, self.cores / self.busy) if self.busy else workers
        self._tries[workers] = Try(workers, at_once / self.seconds, 0.1)
        return self._tries[workers]


def searched(monkeypatch, seconds, busy, step, cores=8, **options):
    monkeypatch.setattr(MODULE + "usable_cores", lambda: cores)
    loader = DataLoader(TensorDataset(torch.zeros(1000)), 10, **options)
    return Modelled(loader, step, seconds, busy, cores).run()


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
    ],
)
def test_the_fewest_that_keep_up(monkeypatch, seconds, busy, step, workers):
    found = searched(monkeypatch, seconds, busy, step)
    assert found.workers == workers
    assert found.loader.num_workers == workers


@settings(max_examples=300, deadline=None)
@given(
    seconds=st.floats(1e-5, 5),
    busy=st.floats(0, 1),
    step=st.one_of(st.just(0.0), st.floats(1e-4, 2)),
    cores=st.integers(1, 64),
)
def test_never_slower_than_without_and_never_far_from_the_best(seconds, busy, step, cores):
    with pytest.MonkeyPatch.context() as patch:
        found = searched(patch, seconds, busy, step, cores)
        model = Modelled(DataLoader(torch.zeros(4)), step, seconds, busy, cores)

        def pace(workers):
            tried = model._alone()[0] if workers == 0 else model._try(workers)
            return model._pace(tried)

        assert pace(found.workers) >= 0.95 * pace(0)
        bound = max(1, min(64, max(cores, int(cores / busy) if busy > 1e-3 else 64)))
        if step:
            assert pace(found.workers) >= 0.9 * max(map(pace, range(bound + 1)))


def test_workers_beyond_the_cores_are_taken_back(monkeypatch):
    found = searched(monkeypatch, 0.2, 1.0, 0.03, num_workers=32)
    assert found.workers == 8
    assert "32 workers, each of which keeps 100% of a core busy, are more than this machine can serve (8 cores)" in (
        found.reason
    )


def test_shared_memory_bounds_workers(monkeypatch):
    monkeypatch.setattr(MODULE + "free_shared_memory", lambda: 18_000)  # half of it: 9 batches of 1,000 bytes
    assert searched(monkeypatch, 2.0, 0.0, 0.1).workers == 3
    monkeypatch.setattr(MODULE + "free_shared_memory", lambda: 0)
    assert searched(monkeypatch, 2.0, 0.0, 2.0).workers == 1


def test_workers_live_on_where_starting_them_shows(monkeypatch):
    assert searched(monkeypatch, 0.05, 1.0, 0.01).persistent  # 0.1 s of 100 batches in 1 s
    assert not searched(monkeypatch, 1.0, 0.0, 0.5).persistent
    assert searched(monkeypatch, 1.0, 0.0, 0.5, num_workers=1, persistent_workers=True).persistent

    class Changing(TensorDataset):
        def set_epoch(self, epoch):
            pass

    monkeypatch.setattr(MODULE + "usable_cores", lambda: 8)
    loader = DataLoader(Changing(torch.zeros(100)), 10)
    assert not Modelled(loader, 0.01, 0.05, 1.0, 8).run().persistent


class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.rand(3) + random.random() + np.random.rand()


@pytest.mark.parametrize("step_time", [0.0, 1e-4, 10.0])
def test_a_trial_leaves_no_trace(step_time):
    generator = torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler([1.0] * 64, 40, generator=generator)
    loader = DataLoader(Noisy(), 4, sampler=sampler, generator=generator)

    def states():
        python, numpy = random.getstate(), np.random.get_state()
        return [torch.get_rng_state().tolist(), generator.get_state().tolist(), python, [*map(str, numpy)]]

    before = states()
    found = tune(loader, step_time)
    assert states() == before
    assert found.loader.batch_sampler is loader.batch_sampler
    assert found.loader.generator is generator
    assert {tried.workers for tried in found.tries} >= {0}
    assert all(tried.batches_per_second > 0 and tried.start_seconds > 0 for tried in found.tries)


def test_batches_are_the_loaders():
    data = TensorDataset(torch.arange(50))
    loaders = [DataLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    found = tune(loaders[0], 1e-6)
    for ours, theirs in zip(found.loader, loaders[1], strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_an_own_list_of_batches():
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_sampler=[[1, 2], [3]])
    assert [batch[0].tolist() for batch in tune(loader, 1e-6).loader] == [[1, 2], [3]]


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("samples of a stream would be lost")


class Own(Sampler):
    def __iter__(self):
        raise AssertionError("its position would be lost")

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    "loader", [DataLoader(Stream()), DataLoader(torch.zeros(3), sampler=Own()), [torch.zeros(3)]], ids=repr
)
def test_what_trials_would_use_up_is_refused(loader):
    with pytest.raises(ValueError, match="loader must be a DataLoader that trials can iterate"):
        tune(loader, 0.1)


@pytest.mark.parametrize(("step_time", "budget"), [(-1.0, 1.0), (float("nan"), 1.0), (1.0, -1.0)])
def test_arguments_are_checked(step_time, budget):
    with pytest.raises(ValueError, match="step_time and budget must be >= 0"):
        tune(DataLoader(torch.zeros(3)), step_time, budget=budget)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({}, 4),
    ],
)
def test_cores_are_counted_within_a_containers_quota(monkeypatch, tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    for cpu in range(8):  # two hardware threads each
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr("flatout.data.machine._CGROUP", tmp_path)
    monkeypatch.setattr("flatout.data.machine._CPUS", tmp_path)
    monkeypatch.setattr("flatout.data.machine.os.sched_getaffinity", lambda _: range(8))
    assert usable_cores() == cores

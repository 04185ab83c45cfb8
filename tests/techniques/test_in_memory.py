"""Row 13: what serves a job's data from memory, and the batches that it makes."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

import flatout
from flatout.data import CachedDataset, InMemoryLoader
from flatout.job import Job
from flatout.report.model import Pace
from flatout.techniques import NotApplicable
from flatout.techniques.in_memory import InMemory
from tests.helpers import bits
from tests.jobs import QUICK, Net

pytestmark = pytest.mark.usefixtures("short_trials")


class Decoded(Dataset):
    """Says in shared memory how often each sample was made."""

    def __init__(self, extra=lambda: 0.0):
        self.extra = extra
        self.made = torch.zeros(64, dtype=torch.int64).share_memory_()

    def __len__(self):
        return 64

    def __getitem__(self, i):
        self.made[i] += 1
        return torch.full((8,), i + self.extra()), i % 3


def negated(samples):
    x, y = default_collate(samples)
    return -x, y


def optimized(data, techniques=None, **options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, 10, shuffle=True, **options)
    choices = QUICK | {"in_memory": True} | (techniques or {})
    run = flatout.optimize(model, loader, optimizer, functional.cross_entropy, techniques=choices, budget=0)
    return run, loader, next(row for row in run.report.rows if row.technique == "in_memory")


def seen(loader):
    torch.manual_seed(3)
    return [(bits(x), bits(y)) for _ in range(2) for x, y in loader], bits(torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, negated])
def test_the_same_batches_and_nothing_decoded_any_more(collate, workers):
    data = Decoded()
    run, loader, row = optimized(data, collate_fn=collate, num_workers=workers)
    assert row.chosen == ("cached" if collate is None else "cached samples")
    data.made.zero_()
    ours, our_state = seen(run.loader)
    assert int(data.made.sum()) == 0
    theirs, their_state = seen(loader)
    assert ours == theirs
    assert our_state == their_state


def test_workers_are_chosen_over_the_samples_in_memory():
    data = Decoded()
    run, loader, _ = optimized(data, {"workers": 1}, collate_fn=negated)
    assert run.plan.decisions["in_memory"] is True
    assert run.plan.decisions["workers"]["num_workers"] == 1
    data.made.zero_()
    ours, _ = seen(run.loader)
    assert int(data.made.sum()) == 0
    assert ours == seen(loader)[0]


def test_random_samples_are_left_alone():
    with pytest.raises(ValueError, match=r"in_memory.*random"):
        optimized(Decoded(lambda: float(torch.rand(()))), collate_fn=negated)


def die():
    if get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def job_of(loader):
    return Job(Net(), loader, loader, None, None, None, torch.device("cpu"))


@pytest.mark.parametrize("collate", [None, negated])
def test_a_worker_that_dies_is_a_reason(collate):
    loader = DataLoader(Decoded(die), collate_fn=collate, num_workers=1)
    (candidate,) = InMemory().candidates(job_of(loader))
    with pytest.raises(NotApplicable, match="was killed by SIGKILL"):
        candidate.make()


def test_what_runs_in_workers_alone_stays_there():
    with pytest.raises(NotApplicable, match="worker_init_fn runs in worker processes only"):
        InMemory().check(job_of(DataLoader(Decoded(), num_workers=1, worker_init_fn=print)))
    InMemory().check(job_of(DataLoader(Decoded(), worker_init_fn=print)))


def test_candidates():
    def made(**options):
        (candidate,) = InMemory().candidates(job_of(DataLoader(Decoded(), **options)))
        return candidate.make()

    assert type(made()) is InMemoryLoader
    for options in ({"collate_fn": negated}, {"batch_size": None}):
        clone = made(**options)
        assert type(clone) is DataLoader
        assert type(clone.dataset) is CachedDataset
        assert clone.dataset._table.missing() == []


def test_the_time_to_decode_everything():
    pace = Pace(step_ms=30.0, load_ms=10.0, samples_per_second=1.0)
    loaders = DataLoader(Decoded()), DataLoader(Decoded(), num_workers=2)
    assert [InMemory().setup_estimate(job_of(loader), pace) for loader in loaders] == pytest.approx([0.64, 2.56])


def test_data_on_the_device():
    data = TensorDataset(torch.arange(64.0).repeat(8, 1).T.contiguous(), torch.arange(64) % 3)
    loader = DataLoader(data, 8, shuffle=True)
    run = flatout.optimize(Net(), loader, techniques={**QUICK, "in_memory": "device"}, budget=0)
    assert run.plan.decisions["in_memory"] == "device"
    assert run.loader._prefetcher.loader.device == torch.device("cpu")
    torch.manual_seed(1)
    theirs = [x.tolist() for x, _ in loader]
    torch.manual_seed(1)
    assert [x.tolist() for x, _ in run.loader] == theirs


def test_data_that_has_to_be_decoded_is_not_kept_on_the_device():
    with pytest.raises(NotApplicable, match="cannot be kept on the device: the dataset is a Decoded"):
        InMemory().forced(job_of(DataLoader(Decoded())), "device")

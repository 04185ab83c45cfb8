"""Data in memory, and batches from this data."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

import flatout
from flatout.data import CachedDataset, InMemoryLoader
from flatout.data.watch import MOST_READ
from flatout.report.model import Pace
from tests.helpers import bits
from tests.jobs import QUICK, Net, job_of
from tests.reasons import reasons
from tests.techniques.harness import candidates, forced, refusal, refused, setup_seconds

EPOCHS = 2


class Decoded(Dataset):
    """Dataset that counts in shared memory how often each sample is made."""

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
    return run, loader, run.report.row("in_memory")


def seen(loader):
    torch.manual_seed(3)
    return [(bits(x), bits(y)) for _ in range(EPOCHS) for x, y in loader], bits(torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, negated])
def test_the_same_batches_and_few_samples_decoded_again(collate, workers):
    data = Decoded()
    run, loader, row = optimized(data, collate_fn=collate, num_workers=workers)
    assert row.chosen == ("cached" if collate is None else "cached samples")
    data.made.zero_()
    ours, our_state = seen(run.loader)
    assert int(data.made.sum()) <= EPOCHS * MOST_READ
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
    assert int(data.made.sum()) <= EPOCHS * MOST_READ
    assert ours == seen(loader)[0]


def test_random_samples_are_left_alone():
    with pytest.raises(ValueError, match="in_memory") as refused_for:
        optimized(Decoded(lambda: float(torch.rand(()))), collate_fn=negated)
    assert "random-samples" in reasons(str(refused_for.value))


def die():
    if get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def over(loader):
    return job_of(Net(), loader=loader)


@pytest.mark.parametrize("collate", [None, negated])
def test_a_worker_that_dies_is_a_reason(collate):
    (candidate,) = candidates("in_memory", over(DataLoader(Decoded(die), collate_fn=collate, num_workers=1)))
    assert "worker-killed" in refused(candidate.make)


def test_code_that_runs_in_workers_alone_stays_there():
    assert "worker-init-fn" in refusal("in_memory", over(DataLoader(Decoded(), num_workers=1, worker_init_fn=print)))
    assert refusal("in_memory", over(DataLoader(Decoded(), worker_init_fn=print))) is None


def test_loaders_that_are_no_dataloader_are_left_alone():
    assert "not-a-dataloader" in refusal("in_memory", over([torch.zeros(2, 8)]))


def test_candidates():
    def made(**options):
        data = Decoded()
        (candidate,) = candidates("in_memory", over(DataLoader(data, **options)))
        loader = candidate.make()
        data.made.zero_()
        batches = len(list(loader))
        assert batches == len(DataLoader(data, **options))
        assert int(data.made.sum()) <= MOST_READ  # every sample was decoded before
        return loader

    assert type(made()) is InMemoryLoader
    for options in ({"collate_fn": negated}, {"batch_size": None}):
        clone = made(**options)
        assert type(clone) is DataLoader
        assert type(clone.dataset) is CachedDataset


def test_the_time_to_decode_everything():
    pace = Pace(step_ms=30.0, load_ms=10.0, samples_per_second=1.0)
    loaders = DataLoader(Decoded()), DataLoader(Decoded(), num_workers=2), [torch.zeros(2, 8)]
    estimates = [setup_seconds("in_memory", over(loader), pace) for loader in loaders]
    assert estimates == pytest.approx([0.64, 2.56, 0.0])


def test_tensors_are_gathered_from_where_they_are():
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), 8)
    pace = Pace(step_ms=30.0, load_ms=10.0, samples_per_second=1.0)
    (candidate,) = candidates("in_memory", over(loader))
    assert candidate.label == "gathered"
    assert setup_seconds("in_memory", over(loader), pace) == 0
    on_gpu = job_of(Net(), loader=loader, device="cuda")
    assert [each.value for each in candidates("in_memory", on_gpu)] == ["device", True]


def test_data_on_the_device():
    data = TensorDataset(torch.arange(64.0).repeat(8, 1).T.contiguous(), torch.arange(64) % 3)
    loader = DataLoader(data, 8, shuffle=True)
    run = flatout.optimize(Net(), loader, techniques={**QUICK, "in_memory": "device"}, budget=0)
    assert run.plan.decisions["in_memory"] == "device"
    torch.manual_seed(1)
    theirs = [x.tolist() for x, _ in loader]
    torch.manual_seed(1)
    assert [x.tolist() for x, _ in run.loader] == theirs
    assert forced("in_memory", "device", over(loader)).make().device == torch.device("cpu")


def test_data_that_has_to_be_decoded_is_not_kept_on_the_device():
    job = over(DataLoader(Decoded()))
    assert "not-on-device" in refused(lambda: forced("in_memory", "device", job))


@pytest.mark.parametrize("value", ["cuda", 1, "gathered"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=rf"in_memory.*{value!r}"):
        forced("in_memory", value, over(DataLoader(Decoded())))

"""Assumptions of data in memory and of workers: refused where they do not hold, asked for by name or not."""

from __future__ import annotations

import copy
import itertools
import sqlite3
import threading
import time
import zlib

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

import flatout
from flatout.guards import ORDER_FIXED, SAMPLES_FIXED, SAMPLES_PORTABLE, differs_in_workers
from flatout.report.model import Pace
from tests.jobs import QUICK, Net, job_of
from tests.reasons import reasons
from tests.techniques.harness import candidates, refusal


class Samples(Dataset):
    def __init__(self, held=None):
        self.held = held

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((8,), float(i)), i % 3


class Counting(Samples):
    calls = 0

    def __getitem__(self, i):
        self.calls += 1
        return super().__getitem__(i)


class OfTime(Samples):
    def __getitem__(self, i):
        return torch.full((8,), float(time.perf_counter_ns() % 1_000_003)), i % 3


class OfProcess(Samples):
    def __getitem__(self, i):
        return torch.full((8,), float(get_worker_info() is None)), i % 3


class OnlyHere(Samples):
    def __getitem__(self, i):
        if get_worker_info() is not None:
            raise OSError("no handle")
        return super().__getitem__(i)


def job_over(dataset, **options):
    return job_of(Net(), loader=DataLoader(dataset, 4, **options))


def held_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock


HELD = {
    "database": lambda path: sqlite3.connect(":memory:"),
    "iterator": lambda path: itertools.count(),
    "thread": lambda path: threading.Thread(target=print),
    "lock": lambda path: held_lock(),
    "writable": lambda path: open(path / "log", "w"),  # noqa: SIM115
}


@pytest.mark.parametrize("name", HELD)
def test_what_processes_cannot_share(name, tmp_path):
    job = job_over(Samples([HELD[name](tmp_path)]))
    assert "'held'" in SAMPLES_PORTABLE.contradiction(job)


def test_what_processes_can_share(tmp_path):
    (tmp_path / "data").write_text("a")
    with open(tmp_path / "data") as file:
        held = [file, threading.Lock(), torch.zeros(3), {"a": lambda x: x}]
        assert SAMPLES_PORTABLE.contradiction(job_over(Samples(held))) == ""


class Listing(Samples):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __getitem__(self, i):
        self.seen.append(i)
        return super().__getitem__(i)


class Logging(Samples):
    def __getitem__(self, i):
        with open(self.held, "a") as file:
            file.write(f"{i}")
        return super().__getitem__(i)


@pytest.mark.parametrize(("dataset", "name"), [(Counting, "'calls'"), (Listing, "'seen'")])
def test_a_dataset_that_counts_its_samples(dataset, name):
    for guard in (SAMPLES_PORTABLE, SAMPLES_FIXED):
        counted = dataset()
        before = copy.deepcopy(vars(counted))
        assert name in guard.contradiction(job_over(counted))
        assert vars(counted) == before


def test_a_file_that_samples_write(tmp_path):
    path = tmp_path / "log"
    for guard in (SAMPLES_PORTABLE, SAMPLES_FIXED):
        assert str(path) in guard.contradiction(job_over(Logging(path)))
    assert not path.exists()


class Line(Samples):
    def __getitem__(self, i):
        return torch.full((8,), float(self.held.readline())), i % 3


def test_the_position_in_a_file_is_put_back(tmp_path):
    (tmp_path / "data").write_text("\n".join(map(str, range(1000))))
    with open(tmp_path / "data") as file:
        file.readline()
        assert SAMPLES_FIXED.contradiction(job_over(Line(file))) != ""
        assert file.readline() == "1\n"


@pytest.mark.parametrize("dataset", [OfProcess, OnlyHere])
def test_samples_of_two_workers_are_compared(dataset):
    assert differs_in_workers(DataLoader(dataset())) != ""
    assert differs_in_workers(DataLoader(Samples())) == ""


def test_samples_that_differ_when_made_again():
    assert SAMPLES_FIXED.contradiction(job_over(OfTime())) != ""
    assert SAMPLES_FIXED.contradiction(job_over(Samples())) == ""


class Hardest(Sampler):
    scores = torch.zeros(16)

    def __iter__(self):
        for _ in range(16):
            yield int(self.scores.argmax())

    def __len__(self):
        return 16


def test_an_order_by_the_training():
    assert ORDER_FIXED.contradiction(job_over(Samples(), sampler=Hardest())) != ""
    assert ORDER_FIXED.contradiction(job_over(Samples(), shuffle=True)) == ""


FORCED = {
    "order-not-fixed": ("workers", 1, Samples(), {"sampler": Hardest()}),
    "not-portable": ("workers", 1, OfProcess(), {}),
    "samples-not-fixed": ("in_memory", True, OfTime(), {}),
}


@pytest.mark.parametrize("code", FORCED)
def test_an_error_names_the_assumption(code):
    technique, value, dataset, options = FORCED[code]
    loader = DataLoader(dataset, 4, **options)
    with pytest.raises(ValueError, match=technique) as refused:
        flatout.optimize(Net(), loader, plan=None, techniques=QUICK | {technique: value})
    assert code in reasons(str(refused.value))


def test_data_that_changes_unseen_is_kept_only_if_forced():
    pace = Pace(step_ms=30.0, load_ms=10.0, samples_per_second=1.0)
    assert "samples-not-fixed" in refusal("in_memory", job_over(Samples(zlib.decompressobj())), pace)
    run = flatout.optimize(
        Net(), DataLoader(Samples(zlib.decompressobj()), 4), plan=None, techniques=QUICK | {"in_memory": True}
    )
    assert run.plan.decisions["in_memory"] is True


def test_data_whose_watch_costs_too_much_is_left_alone():
    dataset = Samples([{"a": [i]} for i in range(20_000)])
    slow, quick = (Pace(step_ms=ms, load_ms=10.0, samples_per_second=1.0) for ms in (1e6, 1e-3))
    assert "samples-not-fixed" in refusal("in_memory", job_over(dataset), quick)
    assert len(candidates("in_memory", job_over(dataset), slow)) == 1


def test_a_break_is_reported_and_the_order_goes_on():
    dataset = Samples()
    run = flatout.optimize(Net(), DataLoader(dataset, 4), plan=None, techniques=QUICK | {"in_memory": True})
    list(run.loader)
    assert run.report.row("in_memory").status == "kept"
    dataset.held = 3
    assert torch.cat([labels for _, labels in run.loader]).tolist() == [i % 3 for i in range(16)]
    assert run.report.row("in_memory").status != "kept"
    assert "samples-not-fixed" in reasons(run.report.row("in_memory"))

"""Memory of the cache: shared by all processes, each row written once, freed at the end."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, get_worker_info

from flatout.data import CachedDataset, NotCacheable
from flatout.data.samples import taken_apart
from flatout.data.table import SharedBytes, Table
from flatout.native import _host
from tests.data.harness import columns_of, memory_left
from tests.samples import Counted, Made, own_memory, same

MIB = 1 << 20


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def memory_of(field: str) -> int:
    """Return a field of this process's memory map, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


# -- states of rows ---------------------------------------------------------------------------------------------------


def test_a_row_is_claimed_once():
    memory = torch.zeros(3, dtype=torch.uint8)
    states = _host.RowStates(memory.data_ptr(), 3, memory)
    assert not states.is_complete(1)
    assert states.claim(1)
    assert not states.claim(1)
    assert not states.is_complete(1)
    states.give_up(1)
    assert states.claim(1)
    states.complete(1)
    assert states.is_complete(1)
    assert not states.claim(1)
    assert not states.is_complete(0)
    for row in (3, 2**40):
        with pytest.raises(IndexError, match="row"):
            states.is_complete(row)
        with pytest.raises(IndexError, match="row"):
            states.claim(row)


def test_states_keep_their_memory():
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    states = _host.RowStates(memory.data_ptr(), 1 << 20, memory)
    del memory
    other = torch.ones(1 << 20, dtype=torch.uint8)
    assert states.claim(77)
    assert not other.eq(0).any()


def claim_all(memory: torch.Tensor, won: torch.Tensor, barrier) -> None:
    states = _host.RowStates(memory.data_ptr(), len(memory), memory)
    barrier.wait()
    for row in range(len(memory)):
        won[row] += states.claim(row)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_never_claim_the_same_row():
    context = mp.get_context("fork")
    barrier = context.Barrier(2)
    memory = SharedBytes(50_000)
    won = [torch.zeros(50_000, dtype=torch.uint8).share_memory_() for _ in range(2)]
    processes = [context.Process(target=claim_all, args=(memory.tensor, mine, barrier)) for mine in won]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert torch.equal(won[0] + won[1], torch.ones(50_000, dtype=torch.uint8))


# -- rows -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([torch.bool, torch.uint8, torch.float32, torch.complex128]), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(1, 70),
)
def test_rows_do_not_overlap(dtypes, shape, rows):
    def made(row):
        return [torch.full(shape, (row + leaf) % 251).to(dtype) for leaf, dtype in enumerate(dtypes)]

    table = Table(taken_apart(made(0))[0], rows)
    for row in reversed(range(rows)):
        table.put(row, made(row))
    for row in range(rows):
        assert same(table.take(row), made(row))
        assert table.holds(row, made(row))
    assert table.missing() == []
    assert table.note is None
    assert all(column.data_ptr() % 64 == 0 for column in table.columns if column.numel())


def test_a_row_is_not_to_be_had_before_it_is_whole():
    layout, values = taken_apart((torch.ones(2), 3))
    table = Table(layout, 4)
    with pytest.raises(RuntimeError):
        table.put(2, [torch.ones(5), 3])
    assert not table.has(2)
    assert table.missing() == [0, 1, 2, 3]
    table.put(2, values)
    assert table.has(2)
    table.put(2, [torch.zeros(2), 4])  # another process wrote the row first
    assert same(table.take(2), (torch.ones(2), 3))


@pytest.mark.parametrize("rows", [4, 64])
def test_the_first_note_stays(rows):
    table = Table(taken_apart(1)[0], rows)
    assert table.leave_note("the first")
    assert not table.leave_note("the second")
    assert table.note == "the first"
    table = Table(taken_apart(1)[0], rows)
    assert table.leave_note("ü" * 1000)
    assert table.note == "ü" * 255
    assert table.missing() == list(range(rows))
    table.put(0, [5])
    assert table.take(0) == 5


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_taken_as_rows_are_written():
    layout, values = taken_apart(torch.ones(MIB, dtype=torch.uint8))
    before = memory_of("Rss")
    table = Table(layout, 1000)
    assert memory_of("Rss") - before < 8 * MIB
    for row in range(20):
        table.put(row, values)
    assert 20 * MIB <= memory_of("Rss") - before < 40 * MIB


def test_a_hundred_caches_leave_nothing_behind():
    def use():
        cached = CachedDataset(Made(lambda i: torch.full((1000,), i)))
        column, sample = columns_of(cached)[0], cached[3]
        pickle.loads(pickle.dumps(SharedBytes(5)))
        del cached
        assert torch.equal(column[3], sample)  # memory lives as long as its users

    use()
    before, mapped = descriptors(), len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(100):
        use()
    assert descriptors() == before
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mapped + 50


class Reading(Dataset):
    """Dataset that reads all samples in a worker, and returns the growth of the worker's own memory."""

    def __init__(self, cached):
        self.cached = cached

    def __len__(self):
        return 2

    def __getitem__(self, _):
        for _ in range(3):  # the first reads allocate Python's own memory
            self.cached[0]
        gc.collect()
        before = memory_of("Private_Dirty")
        total = sum(float(self.cached[i][0, 0]) for i in range(len(self.cached)))
        assert total == sum(range(len(self.cached)))
        return get_worker_info().id, memory_of("Private_Dirty") - before


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_workers_do_not_copy(workers):
    cached = CachedDataset(Made(lambda i: torch.full((256, 256), float(i)), 256))  # 64 MiB
    cached.fill(num_workers=workers)
    sum(float(cached[i].sum()) for i in range(256))  # maps the memory here, as in the worker
    grown = list(DataLoader(Reading(cached), 1, num_workers=2))
    assert sorted(int(worker) for worker, _ in grown) == [0, 1]
    assert all(int(growth) < 4 * MIB for _, growth in grown), grown


def fill_the_rest(both: list[CachedDataset], data: Counted) -> None:
    for cached in both:
        assert all(same(cached[i], own_memory(data[i])) for i in (3, 4))
        cached.fill()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_started_anew_shares_the_rows_both_ways(method, monkeypatch):
    both = [CachedDataset(Counted())]
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        both.append(CachedDataset(Counted()))
    for cached in both:
        cached[3], cached[4]
        cached.dataset.made.zero_()
    before = descriptors()
    process = mp.get_context(method).Process(target=fill_the_rest, args=(both, Counted()))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    for cached in both:
        made = cached.dataset.made.tolist()
        assert sum(count > 0 for count in made) >= 19
        assert sum(made) <= 19 + 16  # up to 16 samples are made again, to be compared
        assert all(same(cached[i], own_memory(Counted()[i])) for i in range(37))
        assert sum(cached.dataset.made.tolist()) <= sum(made) + 16
    process.close()
    del process
    if method == "spawn":  # the server keeps a pipe
        assert descriptors() <= before + 1


def test_without_memfd(monkeypatch):
    """Delete the function, as on systems without this system call. torch's shared memory replaces it."""
    monkeypatch.delattr(os, "memfd_create")
    data = Counted()
    cached = CachedDataset(data)
    cached.fill(num_workers=2)
    data.made.zero_()
    assert all(same(cached[i], own_memory(Counted()[i])) for i in range(37))
    assert int(data.made.sum()) == 0
    copied = pickle.loads(pickle.dumps(cached))
    copied.fill()
    assert copied.dataset.made.tolist() == [1] * 37  # a copy starts empty
    with memory_left(shared_memory=1000), pytest.raises(NotCacheable, match="/dev/shm"):
        CachedDataset(data)

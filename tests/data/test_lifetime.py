"""Cleanup of threads, file descriptors and memory after breaks, errors, forks and interpreter exit."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.data import InMemoryLoader, Prefetcher, clone_loader
from flatout.native import _host
from tests.data.harness import CopyingPrefetcher, eventually, rings_of, threads_end
from tests.helpers import in_child, native_threads

LOADER = DataLoader(TensorDataset(torch.arange(500_000).reshape(200, 2500), torch.arange(200)), 8, shuffle=True)
"""Loader of 160 KB batches, which threads gather. The consumer gathers smaller batches itself."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def break_after(loader, batches: int) -> None:
    for number, _ in enumerate(loader):
        if number == batches:
            break


def copying(loader) -> CopyingPrefetcher:
    return CopyingPrefetcher(loader, "cpu")


WRAPPERS = {
    "memory": InMemoryLoader,
    "prefetched memory": lambda loader: Prefetcher(InMemoryLoader(loader), "cpu"),
    "copied memory": lambda loader: copying(InMemoryLoader(loader)),
    "prefetched": lambda loader: Prefetcher(loader, "cpu"),
    "copied": copying,
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_thousand_breaks_leave_nothing_behind(kind):
    loader = WRAPPERS[kind](LOADER)
    break_after(loader, 3)
    before = descriptors()
    for number in range(1000):
        break_after(loader, number % 5)
    gc.collect()
    assert threads_end()
    assert descriptors() == before


def children() -> set[int]:
    """Return the number of running child processes of this process."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def leaves_nothing(attempt, times: int) -> bool:
    """Return True if `times` attempts after the first one leave no process or descriptor.

    A process of an earlier test may end during the attempts.
    """

    def has_ended(most: float) -> bool:
        gc.collect()
        return children() <= others and descriptors() <= most

    others = children()
    attempt()
    assert eventually(lambda: has_ended(math.inf))
    before = descriptors()
    for _ in range(times):
        attempt()
    return threads_end() and eventually(lambda: has_ended(before))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda loader: Prefetcher(loader, "cpu"), copying], ids=["prefetched", "copied"])
def test_breaks_leave_no_worker_behind(wrap):
    loader = wrap(clone_loader(LOADER, num_workers=1))

    def attempt() -> None:
        for batches in range(3):
            break_after(loader, batches)

    assert leaves_nothing(attempt, 10)


class Interrupted(Dataset):
    """Dataset that raises SIGINT while it loads a sample."""

    def __init__(self) -> None:
        self.main = os.getpid()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 20:
            os.kill(self.main, signal.SIGINT)
            time.sleep(0.2)  # the main thread waits during this time
        return index


def interrupts(loader) -> None:
    """Send SIGINT while the loop is in its step."""
    for number, _ in enumerate(loader):
        if number == 3:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible():
    """Enable SIGINT, because a shell ignores SIGINT in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_keyboard_interrupt_leaves_nothing_behind(kind, workers):
    def attempt() -> None:
        with pytest.raises(KeyboardInterrupt):
            interrupts(WRAPPERS[kind](clone_loader(LOADER, num_workers=workers)))
        if "memory" not in kind:
            with pytest.raises(KeyboardInterrupt):
                list(WRAPPERS[kind](DataLoader(Interrupted(), 4, num_workers=workers)))
        gc.collect()

    assert leaves_nothing(attempt, 3)


def test_threads_come_with_the_second_batch():
    """The test also proves that `threads` sees the threads that the tests above look for."""
    iterator = iter(InMemoryLoader(LOADER, threads=3))
    before = os.listdir("/proc/self/task")  # a new thread bears its name a while later
    next(iterator)
    assert os.listdir("/proc/self/task") == before
    next(iterator)
    assert eventually(lambda: len(native_threads()) == 3)
    del iterator
    assert threads_end()


def test_small_batches_wake_no_thread():
    """The consumer gathers small batches itself, because waking a thread takes longer."""
    loader = InMemoryLoader(DataLoader(TensorDataset(torch.arange(4000).reshape(1000, 4)), 8, shuffle=True), threads=3)
    before = os.listdir("/proc/self/task")
    iterator = iter(loader)
    for _ in range(50):
        next(iterator)
    assert os.listdir("/proc/self/task") == before


def test_threads_come_at_once_for_a_batch_that_takes_longer_than_their_start():
    iterator = iter(InMemoryLoader(DataLoader(TensorDataset(torch.zeros(4, 2**20)), 1), threads=3))
    next(iterator)
    assert eventually(lambda: len(native_threads()) == 3)
    del iterator
    assert threads_end()


def test_end_of_an_epoch_ends_the_threads():
    iterator = iter(InMemoryLoader(LOADER))
    for _ in iterator:
        pass
    assert threads_end()


def test_close_ends_iterators_and_the_loader_goes_on():
    loader = InMemoryLoader(LOADER)
    first, second = iter(loader), iter(loader)
    for iterator in (first, first, second, second):
        next(iterator)
    loader.close()
    loader.close()
    assert threads_end()
    assert list(first) == []
    assert len(list(loader)) == len(LOADER)


def test_closed_stager_says_so():
    stager = _host.Stager(_host.Ring(device=-1, max_idle=4))
    stager.close()
    data = torch.zeros(4, 2)
    columns = _host.Columns([([(data.data_ptr(), 4, 8)], 8, 2, 32, [2])], data)
    with pytest.raises(RuntimeError, match="closed"):
        stager.gather(columns, 0, 0, 2, 1, None).take(0)


@pytest.mark.parametrize("index", [-1, 4, 2**40])
def test_index_out_of_range_is_an_error(index):
    """The check of the index prevents a read outside the tensor."""
    data, indices = torch.zeros(4, 2), torch.tensor([0, index])
    stager = _host.Stager(_host.Ring(device=-1, max_idle=4))
    columns = _host.Columns([([(data.data_ptr(), 4, 8)], 8, 2, 32, [2])], data)
    with pytest.raises(IndexError, match=rf"{index}\b.*\b4\b"):
        stager.gather(columns, indices.data_ptr(), 0, 2, 1, indices).take(0)
    with pytest.raises(IndexError):
        stager.gather(columns, 0, 3, 2, 1, None).take(0)
    stager.close()


def test_unused_capsules_return_their_slot():
    data = torch.arange(8.0).reshape(4, 2)
    ring = _host.Ring(device=-1, max_idle=4)
    stager = _host.Stager(ring)
    columns = _host.Columns([([(data.data_ptr(), 4, 8)], 8, 2, 32, [2])], data)
    capsules = stager.gather(columns, 0, 0, 2, 1, None).take(0)
    assert ring.idle == 0
    tensor = torch.from_dlpack(capsules[0])
    del capsules
    assert ring.idle == 0
    assert torch.equal(tensor, data[:2])
    del tensor
    assert ring.idle == 1
    del columns
    stager.close()


def test_ring_keeps_no_more_than_asked():
    loader = InMemoryLoader(LOADER)
    held = list(loader)
    (ring,) = rings_of(loader)
    del held
    assert ring.idle == (loader.depth + 3) * 2
    loader.close()
    assert ring.idle == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_in_mid_epoch():
    loader = InMemoryLoader(LOADER)
    iterator = iter(loader)
    batch = next(iterator), next(iterator)

    def work():
        nonlocal iterator, batch
        with pytest.raises(RuntimeError, match="fork"):
            list(iterator)
        batch = None  # the lock of the slot's ring may be held forever in this process
        iterator.close()
        iterator = None
        gc.collect()
        assert len(list(InMemoryLoader(LOADER))) == len(LOADER)

    assert in_child(work) == 0
    assert len(list(iterator)) == len(LOADER) - 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_same_loader_in_a_fork():
    """Fork in mid-epoch, as a user does who starts workers. The child's copy of the loader must work too."""
    loader = InMemoryLoader(LOADER)
    iterator = iter(loader)
    next(iterator), next(iterator)

    def work():
        assert len(list(loader)) == len(LOADER)

    assert in_child(work) == 0
    del iterator


@pytest.mark.slow
def test_interpreter_exit_in_mid_epoch():
    # One process imports torch. Each ending is a fork of this process that exits like an interpreter.
    program = """
        import gc, os, signal, sys, torch
        from torch.utils.data import DataLoader, TensorDataset
        from flatout.data import InMemoryLoader, Prefetcher
        endings = ["", "sys.exit(0)", "raise SystemExit", "os._exit(0)", "del loader; gc.collect()"]
        for ending in endings:
            child = os.fork()
            if child == 0:
                signal.alarm(120)
                data = TensorDataset(torch.zeros(4000, 3000))
                loader = Prefetcher(InMemoryLoader(DataLoader(data, 500)), "cpu")
                iterator = iter(loader)
                held = [next(iterator)]
                cycle = [iterator]; cycle.append(cycle)
                exec(ending)
                break
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, (ending, status)
        else:
            print("all ended")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=600, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all ended\n", "")


def test_where_no_thread_can_be_had_the_waiting_one_gathers():
    program = """
        import resource, torch
        from pathlib import Path
        from torch.utils.data import DataLoader, TensorDataset
        from flatout.data import InMemoryLoader

        torch.set_num_threads(1)
        loader = InMemoryLoader(DataLoader(TensorDataset(torch.arange(1000)), 8))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + 6 * 2**20  # less than a thread's stack
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        batches = list(loader)
        assert torch.equal(torch.cat([batch for (batch,) in batches]), torch.arange(1000))
        print(len(list(Path("/proc/self/task").iterdir())))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        timeout=600,
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize("kind", ["memory", "copied memory", "copied"])
def test_closed_by_another_thread(kind):
    """A concurrent iteration ends, or raises a clear error."""
    loader, errors = WRAPPERS[kind](LOADER), []
    stop = threading.Event()

    def iterate() -> None:
        while not stop.is_set():
            try:
                for _ in loader:
                    pass
            except RuntimeError as error:
                if "closed" not in str(error):
                    errors.append(error)
            except Exception as error:
                errors.append(error)

    iterating = [threading.Thread(target=iterate) for _ in range(2)]
    # The threads read the state of torch's generator, which holds a lock. A garbage collection there may switch threads
    # in a callback, and the other thread would wait for this lock forever, with the interpreter's own lock.
    gc.disable()
    try:
        for thread in iterating:
            thread.start()
        for _ in range(200):
            loader.close()
        stop.set()
        for thread in iterating:
            thread.join()
    finally:
        gc.enable()
    assert errors == []
    loader.close()
    assert threads_end()

"""Exceptions and deaths of DataLoader workers, as the training process reports them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from flatout.data import Prefetcher, WorkerError
from flatout.data.remote import RemoteTraceback
from tests.data.harness import CopyingPrefetcher, eventually

KINDS = [Prefetcher, CopyingPrefetcher]


class Broken(Exception):
    def __init__(self, index: int, *, why: str) -> None:
        super().__init__(index, why)
        self.index, self.why = index, why

    def __reduce__(self):
        return _broken, (self.index, self.why)


def _broken(index: int, why: str) -> Broken:
    return Broken(index, why=why)


class Unreturnable(Exception):
    """Exception that pickles, but cannot be reconstructed from its ``args``."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("one text")


def chained(index: int) -> None:
    try:
        try:
            {}["key"]
        except KeyError as error:
            raise OSError(2, "no such file", "image.png") from error
    except OSError as error:
        raise Broken(index, why="bad data") from error


class Failing(Dataset):
    """Dataset that fails at index 5 in a given way."""

    def __init__(self, fail) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            self.fail(index)
        return torch.tensor(index)


class FailingStream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(4)
        chained(4)


def failing_collate(samples):
    if any(sample == 5 for sample in samples):
        chained(5)
    return default_collate(samples)


def failing_start(worker: int) -> None:
    chained(worker)


def failure_of(loader: DataLoader) -> tuple[list, BaseException]:
    seen = []
    try:
        for batch in Prefetcher(loader, "cpu"):
            seen += batch.tolist()
    except Exception as error:
        return seen, error.with_traceback(None)  # the frames of the exception keep the workers alive
    raise AssertionError("nothing was raised")


WHERE = {
    "dataset": lambda **o: DataLoader(Failing(chained), 2, **o),
    "collate": lambda **o: DataLoader(Failing(lambda _: None), 2, collate_fn=failing_collate, **o),
    "stream": lambda **o: DataLoader(FailingStream(), 2, **o),
    "start": lambda **o: DataLoader(Failing(chained), 2, worker_init_fn=failing_start, **o),
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_an_exception_comes_whole(where, persistent):
    seen, error = failure_of(WHERE[where](num_workers=1, persistent_workers=persistent))
    assert seen == {"start": [], "stream": [0, 1, 2, 3]}.get(where, [0, 1, 2, 3])
    assert type(error) is Broken
    index = {"start": 0, "stream": 4}.get(where, 5)
    assert (error.index, error.why, error.args) == (index, "bad data", (index, "bad data"))
    cause = error.__cause__
    assert type(cause) is FileNotFoundError
    assert (cause.errno, cause.filename) == (2, "image.png")
    assert type(cause.__cause__) is KeyError
    assert cause.__cause__.args == ("key",)
    text = cause.__cause__.__cause__
    assert type(text) is RemoteTraceback
    assert "in chained" in str(text)
    assert "worker process 0" in str(text)
    assert str(text) in "".join(traceback.format_exception(error))


def test_the_same_without_workers():
    _, error = failure_of(WHERE["dataset"]())
    assert type(error.__cause__.__cause__) is KeyError
    assert error.__cause__.__cause__.__cause__ is None


def unreturnable(_):
    raise Unreturnable(1, 2)


def local(_):
    class Local(Exception):
        pass

    raise Local("mine")


def test_what_cannot_be_made_again_comes_as_in_torch():
    loader = DataLoader(Failing(unreturnable), 2, num_workers=1)
    _, error = failure_of(loader)
    with pytest.raises(RuntimeError) as theirs:
        list(loader)
    assert type(error) is RuntimeError
    assert "in unreturnable" in str(error)
    assert str(error).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_what_cannot_be_sent_comes_as_text():
    """torch's worker cannot send a class made in a function, and torch's loader waits forever."""
    _, error = failure_of(DataLoader(Failing(local), 2, num_workers=1))
    assert type(error) is RuntimeError
    assert "Local: mine" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_iteration_goes_on_behind_an_exception(kind):
    iterator = iter(kind(DataLoader(Failing(chained), 2, num_workers=2), "cpu"))
    seen: list = []
    for _ in range(6):
        try:
            seen += next(iterator).tolist()
        except Broken:
            seen.append("broken")
    assert seen == [0, 1, 2, 3, "broken", 6, 7, 8, 9, 10, 11]


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def bus(_):
    os.kill(os.getpid(), signal.SIGBUS)


def leave(_):
    os._exit(3)


def leave_quietly(_):
    os._exit(0)


class Started:
    """``worker_init_fn`` that records the pid of each worker and counts its starts."""

    def __init__(self) -> None:
        self.pids, self.times = torch.zeros(2, 2, dtype=torch.int64).share_memory_()

    def __call__(self, worker: int) -> None:
        self.pids[worker] = os.getpid()
        self.times[worker] += 1


DEATHS = [
    (kill, r"SIGKILL.*memory"),
    (bus, r"SIGBUS.*/dev/shm"),
    (leave, r"\bcode 3\b"),
    (leave_quietly, r"\bcode 0\b"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_is_raised_after_the_batches_that_precede_it(kind):
    loader = DataLoader(Failing(kill), 1, num_workers=1, prefetch_factor=1)  # the worker dies with nothing left to send
    seen: list = []
    with pytest.raises(WorkerError):
        seen.extend(map(int, kind(loader, "cpu")))
    assert seen == [0, 1, 2, 3, 4]


class Slow(Failing):
    """Failing dataset whose index 4 waits until the gate opens."""

    def __init__(self, fail, gate) -> None:
        super().__init__(fail)
        self.gate = gate

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index != 4 or self.gate.wait(20)
        return super().__getitem__(index)


def test_a_death_is_raised_after_the_batches_that_others_still_load():
    gate = multiprocessing.Event()
    loader = DataLoader(Slow(kill, gate), batch_size=None, num_workers=2, prefetch_factor=1)
    iterator = iter(CopyingPrefetcher(loader, "cpu"))
    batches, seen = iterator._epoch.batches, [int(next(iterator)), int(next(iterator))]
    assert eventually(lambda: len(iterator._queue) + batches._data_queue.qsize() == 2)
    seen.append(int(next(iterator)))
    is_ahead = bool(iterator._queue)  # batch 3 is copied ahead, unless the pipe of its worker was slow
    if not is_ahead:
        seen.append(int(next(iterator)))
    assert eventually(lambda: not batches._workers[1].is_alive())  # it has begun with batch 5
    if is_ahead:
        seen.append(int(next(iterator)))
    assert not iterator._queue
    gate.set()
    assert eventually(lambda: batches._data_queue.qsize() == 1)
    seen.append(int(next(iterator)))
    with pytest.raises(WorkerError):
        next(iterator)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("end", "cause"), DEATHS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_worker_that_dies(end, cause, persistent):
    started = Started()
    loader = DataLoader(
        Failing(end), 1, num_workers=2, prefetch_factor=1, persistent_workers=persistent, worker_init_fn=started
    )
    iterator = iter(Prefetcher(loader, "cpu"))
    with pytest.raises(WorkerError, match=rf"worker 1\b.*{cause}") as caught:
        list(iterator)
    assert f"pid {started.pids[1]}" in str(caught.value)
    assert list(iterator) == []


@pytest.mark.slow
def test_workers_killed_at_any_moment():
    """Another process kills workers while they wait, load a sample or send a sample."""
    for attempt in range(40):
        started = Started()
        data = torch.arange(100_000).reshape(-1, 10)
        loader = DataLoader(data, 50, num_workers=2, worker_init_fn=started)
        iterator = iter(Prefetcher(loader, "cpu"))
        for _ in range(2 + attempt):  # the workers alternate
            next(iterator)
        victim = int(started.pids[attempt % 2])
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"worker {attempt % 2}\b.*\b{victim}\b.*SIGKILL"):
            list(iterator)


def test_a_new_epoch_after_a_death():
    marker = torch.zeros(1).share_memory_()

    def once(_):
        if not marker:
            marker.fill_(1)
            kill(_)

    prefetcher = Prefetcher(DataLoader(Failing(once), 3, num_workers=1, persistent_workers=True), "cpu")
    with pytest.raises(WorkerError):
        list(prefetcher)
    assert torch.cat(list(prefetcher)).tolist() == list(range(12))


@pytest.mark.parametrize("kind", KINDS)
def test_persistent_workers_live_on(kind):
    started = Started()
    loader = DataLoader(Failing(lambda _: None), 3, num_workers=1, persistent_workers=True, worker_init_fn=started)
    prefetcher = kind(loader, "cpu")
    for _ in range(3):
        assert torch.cat(list(prefetcher)).tolist() == list(range(12))
    assert started.times.tolist() == [1, 0]

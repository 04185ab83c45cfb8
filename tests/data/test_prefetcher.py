"""Prefetcher: batches, order and errors of the loader, with the host as device. tests/gpu tests real devices."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from flatout.data import InMemoryLoader, Prefetcher, is_rewindable
from flatout.data.transfer import NativeCopier
from tests.clock import simulated_time
from tests.data.harness import CopyingPrefetcher, SlowSamples, eventually, threads_end
from tests.helpers import native_threads

KINDS = [Prefetcher, CopyingPrefetcher]


def make_loader(**options) -> DataLoader:
    data = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))
    return DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 5, 50])
@pytest.mark.parametrize("wrap", [lambda loader: loader, InMemoryLoader])
def test_same_batches_for_many_epochs(kind, depth, wrap):
    prefetcher, plain = kind(wrap(make_loader()), "cpu", depth), make_loader()
    for _ in range(3):
        ours, theirs = list(prefetcher), list(plain)
        assert len(ours) == len(theirs) == len(prefetcher)
        for our, their in zip(ours, theirs, strict=True):
            assert type(our) is list
            assert all(map(torch.equal, our, their))
    assert prefetcher.batches == 21
    assert threads_end()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "gaps", "broadcast", "empty", "0-dim"])
def test_layouts(layout):
    tensor = {
        "contiguous": torch.randn(2, 3, 4, 5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(4, 6).t(),
        "gaps": torch.randn(4, 6)[:, ::2],
        "broadcast": torch.randn(1, 6).expand(4, 6),
        "empty": torch.randn(0, 6),
        "0-dim": torch.tensor(3),
    }[layout]
    (ours,) = CopyingPrefetcher([tensor], "cpu")
    assert ours.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert torch.equal(ours, tensor)
    assert ours.stride() == torch.empty_like(tensor).stride()


def test_special_tensors_take_torchs_road():
    leaf = torch.ones(2, requires_grad=True)
    batch = {
        "grad": leaf * 2,
        "sparse": torch.eye(3).to_sparse(),
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    (ours,) = CopyingPrefetcher([batch], "cpu")
    assert ours["grad"].grad_fn is not None
    assert ours["sparse"].is_sparse
    assert torch.equal(ours["conj"], batch["conj"])


def test_nested_batches():
    batch = {"x": [torch.ones(2), ("s", torch.zeros(1))], "n": 3, "none": None}
    (ours,) = CopyingPrefetcher([batch], "cpu")
    assert torch.equal(ours["x"][0], torch.ones(2))
    assert ours["x"][1][0] == "s"
    assert (ours["n"], ours["none"]) == (3, None)
    assert ours is not batch
    assert ours["x"] is not batch["x"]


def test_a_loader_may_fill_the_same_memory_again():
    class Reusing:
        def __iter__(self):
            buffer = torch.empty(1 << 18)
            for number in range(50):
                yield buffer.fill_(number)

    for number, batch in enumerate(CopyingPrefetcher(Reusing(), "cpu", 4)):
        assert bool((batch == number).all())


class Carrier:
    """Batch object that is moved in place."""

    def __init__(self):
        self.x = torch.zeros(3)
        self.number = -1

    def to(self, device):
        self.x = self.x.to(device) + 0  # the host is the device: a copy
        return self


class RefillsContainers:
    """Loader that refills the same dict, list, array and objects for every batch."""

    def __iter__(self):
        batch = {"i": 0, "names": [""], "array": np.zeros(2), "plain": Holder(torch.zeros(2)), "carrier": Carrier()}
        for i in range(7):
            batch["i"], batch["names"][0] = i, str(i)
            batch["array"][:] = i
            batch["plain"].held.fill_(i)
            batch["carrier"].number = i
            batch["carrier"].x.fill_(i)
            if i % 2:
                batch["sometimes"] = torch.full((1,), i)
            else:
                batch.pop("sometimes", None)
            yield batch


class Holder:
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize("depth", [1, 3])
def test_a_loader_may_fill_the_same_containers_again(depth):
    batches = list(CopyingPrefetcher(RefillsContainers(), "cpu", depth))
    assert [batch["i"] for batch in batches] == list(range(7))
    for i, batch in enumerate(batches):
        assert (batch["names"], batch["array"].tolist()) == ([str(i)], [i, i])
        assert batch["plain"].held.tolist() == [i, i]
        assert (batch["carrier"].number, batch["carrier"].x.tolist()) == (i, [i, i, i])
        assert ("sometimes" in batch) == bool(i % 2)


class Fails(IterableDataset):
    def __init__(self, after: int):
        self.after = after

    def __iter__(self):
        for number in range(self.after):
            yield torch.tensor(number)
        try:
            {}["inner"]
        except KeyError as cause:
            raise OSError(5, "no such disc") from cause


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_exceptions_arrive_whole_and_in_their_place(kind, after):
    iterator = iter(kind(DataLoader(Fails(after), batch_size=None), "cpu", 3))
    assert [int(next(iterator)) for _ in range(after)] == list(range(after))
    with pytest.raises(OSError, match="no such disc") as raised:
        next(iterator)
    assert raised.value.args == (5, "no such disc")
    assert isinstance(raised.value.__cause__, KeyError)
    assert any("raise OSError" in line for line in traceback.format_exception(raised.value))


class FailsOnce:
    """Loader like DataLoader, which can continue after an exception."""

    def __iter__(self):
        self.next = -1
        return self

    def __next__(self):
        self.next += 1
        if self.next == 2:
            raise RuntimeError("once")
        if self.next == 5:
            raise StopIteration
        return torch.tensor(self.next)


class Restartable:
    def __iter__(self):
        return iter(FailsOnce())


@pytest.mark.parametrize("kind", KINDS)
def test_iteration_goes_on_after_an_exception(kind):
    iterator, seen = iter(kind(Restartable(), "cpu", 4)), []
    while True:
        try:
            seen.append(int(next(iterator)))
        except RuntimeError:
            seen.append("error")
        except StopIteration:
            break
    assert seen == [0, 1, "error", 3, 4]


class TightCopier(NativeCopier):
    """Copier that runs out of memory for batch 2, twice."""

    refused = 0

    def start(self, batch):
        if int(batch) == 2 and self.refused < 2:
            self.refused += 1
            raise torch.OutOfMemoryError("full")
        return super().start(batch)


class TightPrefetcher(CopyingPrefetcher):
    copier = TightCopier


def test_out_of_memory_is_raised_in_the_order_of_the_batches():
    """A batch whose prefetch runs out of memory keeps its place in the order and is copied again."""
    iterator = iter(TightPrefetcher([torch.tensor(number) for number in range(5)], "cpu", 2))
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(torch.OutOfMemoryError):
        next(iterator)
    assert [int(batch) for batch in iterator] == [2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_breaks_and_close_leave_no_thread(kind):
    data = TensorDataset(torch.zeros(20, 20_000))
    prefetcher = kind(InMemoryLoader(DataLoader(data, 3)), "cpu")
    for _ in range(50):
        for number, _batch in enumerate(prefetcher):  # threads start with the second batch, if batches are large
            if number == 1:
                break
    gc.collect()
    assert threads_end()
    held = iter(prefetcher)
    next(held), next(held)
    assert eventually(native_threads)
    prefetcher.close()
    assert threads_end()
    assert list(held) == []
    assert len(list(prefetcher)) == 7


def test_generators_behind_the_loader_are_closed():
    closed: list = []

    class Source:
        def __iter__(self):
            try:
                yield from range(10)
            finally:
                closed.append(True)

    for kind in KINDS:
        for _ in kind(Source(), "cpu"):
            break
        gc.collect()
    assert closed == [True, True]


def test_worker_processes():
    loader = make_loader(num_workers=1)
    plain = list(make_loader())
    for our, their in zip(CopyingPrefetcher(loader, "cpu"), plain, strict=True):
        assert all(map(torch.equal, our, their))


class Gated(Dataset):
    """Dataset of 12 numbers. Number ``gated`` loads only after ``gate`` is set, and becomes -1 after 20 seconds."""

    def __init__(self, gated: int) -> None:
        self.gated = gated
        self.gate = multiprocessing.Event()
        self.loaded = multiprocessing.Semaphore(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        opened = index != self.gated or self.gate.wait(20)
        self.loaded.release()
        return torch.tensor(index if opened else -1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_that_are_ready_do_not_wait_for_a_slow_worker(depth, workers):
    """One batch is held back. With two workers, the other worker loads later batches meanwhile."""
    dataset = Gated(4)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    iterator = iter(CopyingPrefetcher(loader, "cpu", depth))
    before = [int(next(iterator)) for _ in range(4)]
    dataset.gate.set()
    assert before + [int(batch) for batch in iterator] == list(range(12))


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_that_workers_have_loaded_are_copied_ahead(depth):
    dataset = Gated(8)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=8)
    iterator = iter(CopyingPrefetcher(loader, "cpu", depth))
    first, arrived = int(next(iterator)), iterator._epoch.batches._data_queue
    for _ in range(8):
        dataset.loaded.acquire()
    assert eventually(lambda: len(iterator._queue) + arrived.qsize() == 7)
    assert [first, int(next(iterator))] == [0, 1]
    assert [int(entry.batch) for entry in iterator._queue] == list(range(2, 2 + depth))
    dataset.gate.set()
    assert [int(batch) for batch in iterator] == list(range(2, 12))


def test_other_devices():
    x, y = next(iter(Prefetcher(make_loader(), "meta")))
    assert x.is_meta
    assert y.is_meta


def test_attributes_pass_through():
    loader = make_loader()
    prefetcher = Prefetcher(loader, "cpu")
    assert prefetcher.dataset is loader.dataset
    assert prefetcher.sampler is loader.sampler
    assert prefetcher.batch_sampler is loader.batch_sampler
    assert prefetcher.batch_size == 3
    assert is_rewindable(prefetcher)
    plain = Prefetcher([1, 2], "cpu")
    assert len(plain) == 2
    assert not hasattr(plain, "dataset")
    with pytest.raises(AttributeError, match="nonsense"):
        prefetcher.nonsense  # noqa: B018


def test_set_epoch_reaches_the_sampler():
    data = torch.arange(20)
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    prefetcher = Prefetcher(DataLoader(data, 5, sampler=sampler), "cpu")
    prefetcher.set_epoch(3)
    assert sampler.epoch == 3


def test_iter_is_the_loaders_iter():
    """DataLoader draws its base seed in iter(), not at the first batch."""
    for kind in KINDS:
        torch.manual_seed(0)
        iter(DataLoader(torch.arange(4)))
        theirs = torch.get_rng_state()
        torch.manual_seed(0)
        iter(kind(DataLoader(torch.arange(4)), "cpu"))
        assert torch.equal(torch.get_rng_state(), theirs)


def test_stall_is_counted():
    prefetcher = Prefetcher([torch.zeros(1)] * 4, "cpu")
    assert prefetcher.stall_fraction == 0.0
    with simulated_time(tick=1.0):
        list(prefetcher)
    # The loop asks for batches at 1, 3, 5, 7 and receives them at 2, 4, 6, 8.
    assert prefetcher.stall_seconds == 4.0
    assert prefetcher.stall_fraction == pytest.approx(4 / 7)
    prefetcher.reset_stall()
    assert (prefetcher.stall_seconds, prefetcher.stall_fraction, prefetcher.batches) == (0.0, 0.0, 0)


def test_steps_that_wait_for_a_slow_loader_stall():
    """A batch takes 0.4 s and a step 0.08 s, as in test_tuning.test_workers_feed_a_starved_step."""
    with simulated_time(tick=0.0) as clock:
        prefetcher = Prefetcher(DataLoader(SlowSamples(0.4, 50), batch_size=None), "cpu")
        for number, _ in enumerate(prefetcher):
            if number == 0:
                prefetcher.reset_stall()
            clock.advance(0.08)
    assert prefetcher.batches == 49
    assert prefetcher.stall_seconds == pytest.approx(49 * 0.4)
    assert prefetcher.stall_fraction == pytest.approx(49 * 0.4 / (49 * 0.4 + 48 * 0.08))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"^depth .* 0$"):
        Prefetcher([], "cpu", 0)
    with pytest.raises(TypeError, match=r"^loader "):
        Prefetcher(iter([]), "cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_transform_is_called_once_for_each_batch_in_order(kind, depth):
    calls = []

    def transform(batch):
        calls.append(batch["number"])
        return {"x": batch["x"].float() / 255, "name": batch["name"] + "!"}

    source = [{"x": torch.full((2,), i, dtype=torch.uint8), "name": f"b{i}", "number": i} for i in range(6)]
    ours = list(kind(source, "cpu", depth, transform=transform))
    assert calls == list(range(6))
    assert [batch["name"] for batch in ours] == [f"b{i}!" for i in range(6)]
    for i, batch in enumerate(ours):
        assert torch.equal(batch["x"], torch.full((2,), i / 255))


class Refused(ValueError):
    def __init__(self, number: int, *, hint: str = "none") -> None:
        super().__init__(number)
        self.hint = hint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_an_exception_in_the_transform_arrives_whole_when_its_batch_is_due(kind, depth):
    raised = []

    def transform(batch):
        if batch == 2:
            cause = KeyError("inner")
            raised.append(Refused(2, hint="two"))
            raise raised[0] from cause
        return -batch

    iterator = iter(kind([torch.tensor(i) for i in range(5)], "cpu", depth, transform=transform))
    assert [int(next(iterator)), int(next(iterator))] == [0, -1]
    with pytest.raises(Refused) as caught:
        next(iterator)
    assert caught.value is raised[0]
    assert caught.value.args == (2,)
    assert caught.value.hint == "two"
    assert caught.value.__cause__.args == ("inner",)
    assert [entry.name for entry in caught.traceback][-1] == "transform"
    assert [int(batch) for batch in iterator] == [-3, -4]
    assert threads_end()


class Understated(IterableDataset):
    """Loader that yields more samples than its length."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(range(4))

    def __repr__(self):
        return "Understated()"


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "worker"])
def test_warns_of_more_samples_than_the_length_as_torch_does(options):
    def told(wrap):
        loader = wrap(DataLoader(Understated(), batch_size=1, **options))
        for wants_length in (False, True, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if wants_length:
                    assert len(loader) == 2
                assert len(list(iter(loader))) == 4
            yield [str(warning.message) for warning in caught]

    ours = list(told(lambda loader: Prefetcher(loader, "cpu")))
    assert ours == list(told(lambda loader: loader))
    assert list(map(len, ours)) == [0, 2, 2]

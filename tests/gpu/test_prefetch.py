"""Prefetcher on a real GPU: correct values with a delayed consumer, pinned memory, constant memory, cleanup."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout import native
from flatout.data import InMemoryLoader, Prefetcher
from flatout.data.transfer import TorchCopier, _side_stream, make_copier
from flatout.native import _host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

DEVICE = torch.device("cuda")
NATIVE = native.BUILT_WITH_CUDA and _host.cuda_usable()
ROWS = 64
SHAPE = (ROWS, 64, 1024)  # 16 MiB of float32 per batch, so that a test can see a copy that is half done
PIECES = 5  # staged pieces of a batch: four of 4 MiB, and one for the rest


@pytest.fixture(params=["native", "torch"])
def copier(request, monkeypatch):
    """Return the code path of copies to the GPU: flatout's kernels, or torch alone."""
    if request.param == "native":
        if not NATIVE:
            pytest.skip("needs a build with CUDA kernels and a driver that is new enough for them")
    else:
        monkeypatch.setattr("flatout.data.prefetcher.make_ring", lambda device: None)
    return request.param


class Numbered:
    """Loader of batches that are filled with their number. All batches share one buffer."""

    def __init__(self, batches: int, pinned: bool = False) -> None:
        self.batches = batches
        self.buffer = torch.empty(SHAPE, pin_memory=pinned)

    def __len__(self):
        return self.batches

    def __iter__(self):
        for number in range(self.batches):
            yield {"x": self.buffer.fill_(number), "number": number, "y": torch.tensor([number])}


class Refilled:
    """Collate function that fills one pinned buffer again and again."""

    def __init__(self) -> None:
        self.buffer = torch.empty(SHAPE, pin_memory=True)

    def __call__(self, numbers):
        return self.buffer.fill_(numbers[0])


def delay(cycles: int = 20_000_000) -> None:
    """Block the current stream for about ten milliseconds."""
    torch.cuda._sleep(cycles)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_values_under_a_delayed_consumer(copier, depth, pinned):
    """Each batch is dropped before its kernels have run. The memory must not be reused before these kernels end."""
    stream = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in Prefetcher(Numbered(20, pinned), DEVICE, depth):
            assert batch["x"].is_cuda
            delay()
            wrong += (batch["x"] != batch["number"]).sum() + (batch["y"] != batch["number"]).sum()
            del batch
    torch.cuda.synchronize()
    assert int(wrong) == 0


def test_a_pinned_buffer_of_a_collate_function_may_be_refilled(copier):
    loader = DataLoader(range(8), collate_fn=Refilled(), pin_memory=True)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for number, batch in enumerate(Prefetcher(loader, DEVICE, 3)):
        delay()
        wrong += (batch != number).sum()
    assert int(wrong) == 0


@pytest.mark.skipif(not NATIVE, reason="needs a build with CUDA kernels")
def test_batches_that_torch_has_pinned_need_no_staging():
    """torch's pin thread allocates new memory for each batch."""
    prefetcher = Prefetcher(DataLoader(torch.arange(64.0), 8, num_workers=1, pin_memory=True), DEVICE)
    assert torch.cat(list(prefetcher)).tolist() == list(range(64))
    assert prefetcher._ring.allocations == 0


def test_filling_new_memory_waits_for_a_delayed_consumer(copier):
    """In deterministic mode torch fills new memory, which kernels of a dropped batch may still read."""
    batches = [torch.full((1 << 20,), float(number)) for number in range(32)]  # large, so that staging is slow
    means = []
    with flatout.reproducible(0, warn_only=True):
        assert torch.utils.deterministic.fill_uninitialized_memory
        for batch in Prefetcher(batches, DEVICE, 3):
            delay(2_000_000)
            means.append(batch.mean())
            del batch
    assert torch.stack(means).tolist() == list(range(32))


def test_copies_and_transforms_have_the_highest_priority(copier, monkeypatch):
    monkeypatch.setattr("flatout.data.transfer._side_streams", {})
    if copier == "torch":
        monkeypatch.setattr(native, "has_cuda_runtime", lambda: False)
    side, highest = _side_stream(DEVICE), torch.cuda.Stream.priority_range()[1]
    assert side.priority <= highest < torch.cuda.current_stream().priority


def test_consumer_waits_for_a_delayed_copy(copier):
    """The side stream is late. A consumer that reads at once must still see the new values."""
    prefetcher = Prefetcher(Numbered(6), DEVICE, 2)
    iterator = iter(prefetcher)
    for number in range(6):
        side = iterator._copier._side
        with torch.cuda.stream(side):
            delay()
        batch = next(iterator)
        assert int((batch["x"] != number).sum()) == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_transform_under_a_delayed_consumer(copier, depth):
    """A transform must not allocate memory that kernels of a dropped batch still read."""
    consumer = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    streams = set()

    def transform(batch):
        streams.add(torch.cuda.current_stream())
        doubled = batch["x"] * 2
        return {"x": doubled + 1, "number": batch["number"]}

    consumer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(consumer):
        for batch in Prefetcher(Numbered(20), DEVICE, depth, transform=transform):
            delay()
            wrong += (batch["x"] != 2 * batch["number"] + 1).sum()
            del batch
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert len(streams) == 1
    assert consumer not in streams


def test_an_exception_in_the_transform_leaves_the_rest(copier):
    def transform(batch):
        if batch["number"] == 2:
            raise KeyError("two")
        return batch["x"][0, 0, 0]

    iterator = iter(Prefetcher(Numbered(5), DEVICE, transform=transform))
    seen = [float(next(iterator)), float(next(iterator))]
    with pytest.raises(KeyError, match="two"):
        next(iterator)
    assert seen + [float(value) for value in iterator] == [0.0, 1.0, 3.0, 4.0]


def test_held_batches_stay_valid(copier):
    held = list(Prefetcher(Numbered(12), DEVICE))
    torch.cuda.synchronize()
    for number, batch in enumerate(held):
        assert int((batch["x"] != number).sum()) == 0


def test_in_memory_batches_take_the_direct_road(copier):
    data = TensorDataset(torch.randn(1000, 3, 32, 32), torch.arange(1000))
    generator = torch.Generator().manual_seed(5)
    prefetcher = Prefetcher(InMemoryLoader(DataLoader(data, 64, shuffle=True, generator=generator)), DEVICE)
    ours = [[tensor.cpu() for tensor in batch] for _ in range(2) for batch in prefetcher]
    generator.manual_seed(5)
    plain = DataLoader(data, 64, shuffle=True, generator=generator)
    theirs = [batch for _ in range(2) for batch in plain]
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, our, their))


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_data_on_the_device(shuffle, prefetched):
    data = TensorDataset(torch.randn(1000, 3, 7).half(), torch.arange(1000), torch.rand(1000) < 0.5)
    loader = DataLoader(data, 64, shuffle=shuffle, generator=torch.Generator().manual_seed(5))
    ours = InMemoryLoader(loader, device=DEVICE)
    batches = [batch for _ in range(2) for batch in (Prefetcher(ours, DEVICE) if prefetched else ours)]
    loader.generator.manual_seed(5)
    theirs = [batch for _ in range(2) for batch in loader]
    assert len(batches) == len(theirs)
    for our, their in zip(batches, theirs, strict=True):
        assert all(tensor.is_cuda for tensor in our)
        assert all(torch.equal(tensor.cpu(), expected) for tensor, expected in zip(our, their, strict=True))


def test_data_that_does_not_fit_on_the_device():
    free = torch.cuda.mem_get_info(DEVICE)[0]
    data = torch.empty(1, 1 << 20, dtype=torch.uint8).expand((free >> 20) + 1, 1 << 20)
    with pytest.raises(ValueError, match=r"half of what is free on cuda"):
        InMemoryLoader(DataLoader(TensorDataset(data)), device=DEVICE)


def test_in_memory_batches_are_pinned():
    loader = InMemoryLoader(DataLoader(TensorDataset(torch.zeros(64, 1000)), 8, pin_memory=True))
    (batch,) = next(iter(loader))
    assert batch.is_pinned()
    assert batch.device.type == "cpu"


def test_pinned_in_memory_batches_survive_the_users_own_copies():
    """A batch is freed while its copy waits. No other batch may use its memory during this time."""
    data = torch.arange(64.0)[:, None].expand(64, 1 << 18).contiguous()
    loader = InMemoryLoader(DataLoader(TensorDataset(data), 4, pin_memory=True))
    copies = []
    for (batch,) in loader:
        delay()
        copies.append(batch.to(DEVICE, non_blocking=True)[:, -1])
        del batch
    assert torch.cat(copies).tolist() == list(range(64))


def test_a_capture_stays_valid_while_batches_are_copied(copier):
    """Other threads copy and this thread polls during the capture. Neither may invalidate the graph."""
    x, graph = torch.zeros(8, device=DEVICE), torch.cuda.CUDAGraph()
    iterator = iter(Prefetcher(InMemoryLoader(DataLoader(TensorDataset(torch.zeros(256, 1 << 16)), 8)), DEVICE, 3))
    next(iterator)
    copies = [copied for entry in iterator._queue if (copied := getattr(entry.copy, "_copied", None))]
    with torch.cuda.graph(graph):
        x.add_(1)
        assert all(copied.finished() in (True, False) for copied in copies)
        del copies
        iterator.close()
    graph.replay()
    assert x.tolist() == [1.0] * 8


def test_channels_last_is_kept(copier):
    image = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    (ours,) = Prefetcher([image], DEVICE)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours.cpu(), image)


def test_memory_does_not_grow_with_epochs(copier):
    prefetcher = Prefetcher(Numbered(5), DEVICE)

    def epoch() -> int:
        for batch in prefetcher:
            batch["x"].sum()
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    epoch()
    first = epoch()
    assert all(epoch() == first for _ in range(100))


@pytest.mark.skipif(not NATIVE, reason="needs a build with CUDA kernels")
def test_pinned_memory_is_bounded_when_the_host_runs_ahead():
    prefetcher = Prefetcher(Numbered(60), DEVICE, 2)
    for _batch in prefetcher:
        delay(2_000_000)
    assert prefetcher._ring.allocations <= (prefetcher.depth + 2) * PIECES
    torch.cuda.synchronize()


def test_breaks_leave_no_thread_and_no_descriptor(copier):
    prefetcher = Prefetcher(Numbered(50), DEVICE)

    def leftovers() -> tuple[int, int]:
        gc.collect()
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        return sum(name.startswith("flatout") for name in names), len(os.listdir("/proc/self/fd"))

    for _batch in prefetcher:
        break
    before = leftovers()
    for _ in range(50):
        for _batch in prefetcher:
            break
    assert leftovers() == before
    assert before[0] == 0


def test_batches_may_be_dropped_while_their_copies_run(copier):
    for _ in range(20):
        iterator = iter(Prefetcher(Numbered(8), DEVICE, 4))
        next(iterator)
        iterator.close()
    gc.collect()
    torch.cuda.synchronize()


def test_torch_road_is_chosen_without_a_ring():
    assert type(make_copier(DEVICE, 2, None, fresh=True, transforms=False)) is TorchCopier

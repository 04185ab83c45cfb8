"""Memory of prefetched batches: stream-ordered memory on the device, and pinned memory on the host."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout import native
from flatout.data import InMemoryLoader, Prefetcher
from flatout.native import _host
from tests.emulated_cuda.record import EMULATED, recorded
from tests.helpers import run_script

NATIVE = native.BUILT_WITH_CUDA and _host.cuda_usable()
needs_native = pytest.mark.skipif(not NATIVE, reason="needs a build with CUDA kernels and a driver for them")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

STREAM_ORDERED = """
import json, sys
from unittest import mock
import torch
from torch.utils.data import DataLoader, TensorDataset
from flatout.data import InMemoryLoader, Prefetcher
from flatout.training.graph_recorder import CudaRecorder

assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
BATCHES = 20

class Numbered:
    def __iter__(self):
        for number in range(BATCHES):
            yield {"x": torch.full((64, 1024), float(number)), "number": number}

def wrong_values(streams, transform=None):
    batches = iter(Prefetcher(Numbered(), "cuda", 3, transform=transform))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for number in range(BATCHES):
        with torch.cuda.stream(streams[number % len(streams)]):
            batch = next(batches)
            torch.cuda._sleep(1_000_000)
            wrong += (batch["x"] != batch["number"]).sum()
            del batch
        torch.cuda.current_stream().wait_stream(streams[number % len(streams)])
    return int(wrong)

class OnDevice:
    def __iter__(self):
        for number in range(BATCHES):
            yield {"x": torch.full((64, 1024), float(number), device="cuda")}

def wrong_values_after_a_close(loader, transform=None):
    tensors = []
    for _ in range(BATCHES):
        batches = iter(Prefetcher(loader, "cuda", 3, transform=transform))
        torch.cuda._sleep(1_000_000)
        next(batches)
        batches.close()
        del batches
        tensors.append(torch.full((64, 1024), 7.0, device="cuda"))
    return sum(int((tensor != 7).sum()) for tensor in tensors)

def sum_of_rows_gathered_on_the_device(streams):
    loader = InMemoryLoader(DataLoader(TensorDataset(torch.arange(1024.0)), 64, shuffle=True), device="cuda")
    sums = [torch.zeros((), device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for _ in range(BATCHES):
        batches = iter(loader)
        for number in range(16):
            with torch.cuda.stream(streams[number % len(streams)]):
                torch.cuda._sleep(1_000_000)
                sums[number % len(streams)] += next(batches)[0].sum()
        del batches
    torch.cuda.synchronize()
    return sum(map(int, sums))

def wrong_rows_of_a_dropped_loader(shuffle):
    stream, rows = torch.cuda.Stream(), []
    for number in range(BATCHES):
        data = TensorDataset(torch.full((1024,), float(number)))
        loader = InMemoryLoader(DataLoader(data, 64, shuffle=shuffle), device="cuda")
        with torch.cuda.stream(stream):
            rows.append(torch.stack([batch[0] for batch in loader]))
        del loader
        torch.full((1024,), -1.0, device="cuda")
    torch.cuda.synchronize()
    return sum(int((row != number).sum()) for number, row in enumerate(rows))

def wrong_results_of_warm_up_steps():
    recorder = CudaRecorder(torch.device("cuda", 0))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(BATCHES):
        loss = recorder.aside(lambda: torch.full((64, 1024), float(number), device="cuda"))
        torch.cuda._sleep(1_000_000)
        wrong += (loss != number).sum()
        del loss
    return int(wrong)

def doubled(batch):
    return {"x": batch["x"] * 2 / 2, "number": batch["number"]}

def zeroed(batch):
    batch["x"].zero_()
    return batch

with mock.patch("flatout.data.prefetcher.make_ring", return_value=None) if sys.argv[1] == "torch" else mock.MagicMock():
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    result = {
        "one stream": wrong_values([current]),
        "two streams": wrong_values([current, other]),
        "transform": wrong_values([current], doubled),
        "transform, two streams": wrong_values([current, other], doubled),
        "labels of a transform": wrong_values([current, other], lambda batch: batch),
        "close": wrong_values_after_a_close(Numbered()),
        "close, transform of the loader's device memory": wrong_values_after_a_close(OnDevice(), zeroed),
        "rows": sum_of_rows_gathered_on_the_device([current, other]) - BATCHES * 1024 * 1023 // 2,
        "dropped, shuffled": wrong_rows_of_a_dropped_loader(True),
        "dropped, in order": wrong_rows_of_a_dropped_loader(False),
        "warm-up steps": wrong_results_of_warm_up_steps(),
    }
print(json.dumps(result))
"""


@pytest.mark.parametrize("copier", ["native", "torch"])
def test_memory_in_stream_order(copier):
    """Check the values of batches that are dropped while streams still read them, with cudaMallocAsync.

    This allocator reuses memory as soon as the allocating stream reaches the free. Readers on other streams must be
    ordered before the free.
    """
    if copier == "native" and not NATIVE:
        pytest.skip("needs a build with CUDA kernels and a driver that is new enough for them")
    # A lazy emulated device runs operations late and in random order.
    ended = run_script(
        STREAM_ORDERED, copier, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync", EMULATED_CUDA_ORDER="lazy"
    )
    assert set(json.loads(ended.stdout.splitlines()[-1]).values()) == {0}


FREE_UNDER_WORK = """
import ctypes, sys
import torch
from flatout.data import Prefetcher

prefetcher = Prefetcher([torch.zeros(1024)] * 3, "cuda")
list(prefetcher)
torch.cuda.synchronize()
needs_the_gil = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
assert ctypes.CDLL("libcudart.so.13").cudaLaunchHostFunc(stream, needs_the_gil, None) == 0
if sys.argv[1] == "closed":
    prefetcher.close()
else:
    del prefetcher
"""


@needs_native
@pytest.mark.parametrize("end", ["closed", "deleted"])
def test_pinned_memory_is_freed_without_the_gil(end):
    """The device waits for a host function that needs the GIL, and the free waits for the device."""
    run_script(FREE_UNDER_WORK, end, EMULATED_CUDA_ORDER="lazy", timeout=60)


def batches_of_many_sizes(kind):
    """Return a loader of batches whose sizes change."""
    data = TensorDataset(torch.randn(80, 1 << 14), torch.arange(80))
    sizes = [1, 80, 3, 20, 5, 64, 7, 50, 9, 40, 33, 2, 70, 11, 60, 4]
    loader = DataLoader(data, batch_sampler=[list(range(size)) for size in sizes])
    return InMemoryLoader(loader) if kind == "in memory" else list(loader)


@needs_native
@pytest.mark.skipif(not EMULATED, reason="needs the record of an emulated device")
@pytest.mark.parametrize("kind", ["staged", "in memory"])
def test_a_training_thread_frees_no_pinned_memory(kind):
    """A free of pinned memory waits for all work of the device."""
    prefetcher = Prefetcher(batches_of_many_sizes(kind), "cuda")

    def epoch():
        for batch in prefetcher:
            batch[0].sum()

    assert "cudaFreeHost" not in recorded(epoch).calls


@needs_native
@pytest.mark.skipif(not EMULATED, reason="needs the record of an emulated device")
def test_a_large_batch_is_copied_in_pieces():
    """The device copies one piece while the host stages the next pieces."""
    batch = {"x": torch.randn(10 << 18), "y": torch.arange(7), "z": torch.arange(9)}
    record = recorded(lambda: list(Prefetcher([batch], "cuda")))
    assert record.operations.count("copy to device") == 5


@needs_native
def test_sizes_that_change_need_no_new_staging_memory():
    prefetcher = Prefetcher(batches_of_many_sizes("staged"), "cuda")
    for _ in range(8):
        list(prefetcher)
    buffer_sizes = 6  # powers of two from 128 KiB to 4 MiB
    assert prefetcher._ring.allocations <= (prefetcher.depth + 1) * buffer_sizes

"""Memory of prefetched batches under an allocator that reuses and unmaps memory in stream order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatout import native
from flatout.native import _host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

SCRIPT = """
import json, sys
from unittest import mock
import torch
from flatout.data import Prefetcher

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

def wrong_values_after_a_close():
    tensors = []
    for _ in range(BATCHES):
        batches = iter(Prefetcher(Numbered(), "cuda", 3))
        torch.cuda._sleep(1_000_000)
        next(batches)
        batches.close()
        del batches
        tensors.append(torch.full((64, 1024), 7.0, device="cuda"))
    return sum(int((tensor != 7).sum()) for tensor in tensors)

def doubled(batch):
    return {"x": batch["x"] * 2 / 2, "number": batch["number"]}

with mock.patch("flatout.data.prefetcher.make_ring", return_value=None) if sys.argv[1] == "torch" else mock.MagicMock():
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    result = {
        "one stream": wrong_values([current]),
        "two streams": wrong_values([current, other]),
        "transform": wrong_values([current], doubled),
        "transform, two streams": wrong_values([current, other], doubled),
        "labels of a transform": wrong_values([current, other], lambda batch: batch),
        "close": wrong_values_after_a_close(),
    }
print(json.dumps(result))
"""


@pytest.mark.parametrize("copier", ["native", "torch"])
def test_memory_in_stream_order(copier):
    """With cudaMallocAsync, memory of a dropped batch is gone when its own stream comes to the free."""
    if copier == "native" and not (native.BUILT_WITH_CUDA and _host.cuda_usable()):
        pytest.skip("needs a build with CUDA kernels and a driver that is new enough for them")
    # An emulated device that is lazy runs operations late, in random order.
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "EMULATED_CUDA_ORDER": "lazy"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, copier], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1]).values()) == {0}

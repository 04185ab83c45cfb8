"""Forked processes after the start of CUDA: collection of the parent's garbage does not crash a child."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatout.data import Prefetcher
from tests.helpers import in_child


def event() -> Any:
    recorded = torch.cuda.Event()
    recorded.record()
    return recorded


def tensor_of_two_streams() -> Any:
    tensor = torch.zeros(4, device="cuda")
    tensor.record_stream(torch.cuda.Stream())
    return tensor


def discard(value: Any) -> None:
    """Put a value into a reference cycle, which only the garbage collector frees."""
    cycle = [value]
    cycle.append(cycle)


MAKERS = {"event": event, "tensor": tensor_of_two_streams}


@pytest.mark.parametrize("kind", MAKERS)
def test_garbage_of_cuda_objects_stays_in_a_child(kind: str) -> None:
    gc.disable()
    try:
        discard(MAKERS[kind]())
        assert in_child(gc.collect) == 0
    finally:
        gc.enable()


class Collecting(Dataset[Tensor]):
    """Dataset that collects garbage for each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        gc.collect()
        return torch.tensor(i)


def test_workers_outlive_the_garbage_of_an_earlier_loop() -> None:
    loader = DataLoader(Collecting(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    gc.disable()
    try:
        discard([*Prefetcher([torch.zeros(4)] * 3, device="cuda"), event()])
        batches = [batch.cpu().tolist() for batch in Prefetcher(loader, device="cuda")]
    finally:
        gc.enable()
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]

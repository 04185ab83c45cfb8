"""Out of memory at a chosen allocation.

The training still equals plain torch, and no tensor stays on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulated_cuda.faults import MEMORY_ALLOCATION, failing
from tests.emulated_cuda.record import needs_emulated_devices
from tests.gpu.trainings import Setup, check_same, nothing_left, optimize, train_plainly, trained

pytestmark = needs_emulated_devices

ATTEMPTS = 2  # calls of cudaMalloc for one allocation of torch, which frees its cache after the first


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Leave about ``size`` free bytes to a step, and refuse the first new segment of torch's allocator."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    filled, refused = list(filling()), torch.cuda.memory_stats()["num_ooms"]
    while size > 0:
        size -= filled.pop(0).nbytes  # the largest first
    with failing("cudaMalloc", 1, MEMORY_ALLOCATION, times=ATTEMPTS):
        yield
    assert torch.cuda.memory_stats()["num_ooms"] == refused + 1


def filling() -> Iterator[Tensor]:
    """Yield tensors that fill the free space in the allocator's segments of small blocks."""
    for size in (2**i for i in range(19, 8, -1)):
        before = torch.cuda.memory_reserved()
        while True:
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            if torch.cuda.memory_reserved() > before:
                del tensor
                torch.cuda.empty_cache()
                break
            yield tensor


def check_with_one_failure(setup: Setup, techniques: dict[str, Any], step: int, room: int) -> int | None:
    """Train with one step that runs out of memory, compare with plain torch, and return the micro-batch size."""
    with nothing_left():
        run = optimize(setup, techniques)
        losses = []
        for batch in (batch for _ in range(setup.epochs) for batch in run.loader):
            with room_for(room) if len(losses) == step else contextlib.nullcontext():
                losses.append(run.step(batch))
        ours, part = trained(losses, run.model, run.optimizer, run.scaler), run.micro_batch
        run.undo()
        del run, batch, losses
    check_same(ours, train_plainly(setup), setup)
    return part


@pytest.mark.filterwarnings("ignore:.*ran out of memory:RuntimeWarning")
@pytest.mark.parametrize("room", [100_000, *(pytest.param(room, marks=pytest.mark.slow) for room in (0, 1_000_000))])
@pytest.mark.parametrize("step", [0, 9])
@pytest.mark.parametrize("techniques", [{}, {"fused_optimizer": True}], ids=["torch", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_is_computed_in_parts(precision: str, techniques: dict[str, Any], step: int, room: int) -> None:
    setup = Setup("gpt", precision=precision, max_grad_norm=0.5)
    assert check_with_one_failure(setup, techniques, step, room) == 16


@pytest.mark.filterwarnings("ignore:whole-step CUDA graphs are off:RuntimeWarning")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_replay_becomes_an_eager_step(precision: str) -> None:
    setup = Setup("gpt", precision=precision, max_grad_norm=0.5)
    assert check_with_one_failure(setup, {"fused_optimizer": True, "cuda_graph": True}, 9, 0) is None

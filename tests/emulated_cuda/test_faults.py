"""Failed calls of the CUDA runtime. A failure raises an error and leaves no partial change, and the next try works."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import flatout.optim as fo
from flatout.data import Prefetcher
from flatout.mfu import MfuCounter
from flatout.optim.update import update
from tests.emulated_cuda.faults import ILLEGAL_ADDRESS, LAUNCH_OUT_OF_RESOURCES, MEMORY_ALLOCATION, failing
from tests.emulated_cuda.record import needs_emulated_devices

pytestmark = needs_emulated_devices


def optimizer_with_grads() -> fo.AdamW:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n, device="cuda")) for n in (5, 40_000, 0)]
    for p in params:
        p.grad = torch.linspace(2, 3, p.numel(), device="cuda")
    return fo.AdamW(params)


def bits(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in params for _, value in sorted(optimizer.state.get(p, {}).items())]
    return [tensor.detach().cpu() for tensor in (*params, *states)]


def are_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("function", ["cudaLaunchKernel", "cudaStreamIsCapturing", "cudaSetDevice"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_update_is_done_or_raises_and_has_changed_nothing(function: str, nth: int, is_first: bool) -> None:
    optimizer, undisturbed = optimizer_with_grads(), optimizer_with_grads()
    if not is_first:
        for each in (optimizer, undisturbed):
            update(each, max_grad_norm=1.0)
    before = bits(optimizer)
    update(undisturbed, max_grad_norm=1.0)
    has_failed = False
    with failing(function, nth, LAUNCH_OUT_OF_RESOURCES) as fault:
        try:
            update(optimizer, max_grad_norm=1.0)
        except RuntimeError:
            has_failed = True
    assert has_failed == fault.has_occurred
    assert has_failed or nth > 1
    if has_failed:
        if not is_first:  # a first update has created state
            assert are_equal(bits(optimizer), before)
        update(optimizer, max_grad_norm=1.0)
    assert are_equal(bits(optimizer), bits(undisturbed))


def test_a_check_is_right_after_one_that_failed_between_its_launches() -> None:
    """The failed check leaves a count in its counter, because only the last launch resets the counter."""
    grads = [torch.ones(300, device="cuda"), torch.ones(300, device="cuda", dtype=torch.bfloat16)]
    norm = torch.ops.flatout.unscale_and_check(grads, None, None)[1]
    with failing("cudaLaunchKernel", 2, LAUNCH_OUT_OF_RESOURCES), pytest.raises(RuntimeError):
        torch.ops.flatout.unscale_and_check(grads, None, None)
    for _ in range(2):
        assert torch.equal(torch.ops.flatout.unscale_and_check(grads, None, None)[1], norm)


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize(
    "function",
    ["cudaHostAlloc", "cudaMemcpyAsync", "cudaEventRecordWithFlags", "cudaStreamWaitEvent", "cudaEventCreateWithFlags"],
)
@pytest.mark.parametrize("size", [1000, 3 << 20])  # batches of the second size are staged in four pieces
def test_a_prefetcher_gives_right_batches_or_raises(size: int, function: str, nth: int) -> None:
    batches = [torch.full((size + i,), float(i)) for i in range(1, 9)]
    loader = Prefetcher(batches, "cuda")
    seen = []
    with failing(function, nth, MEMORY_ALLOCATION) as fault:
        try:
            for batch in loader:
                seen.append(batch)
        except RuntimeError:
            assert len(seen) < len(batches)
        else:
            assert len(seen) == len(batches)
    assert fault.has_occurred or nth > 1
    for epoch in (seen, list(loader)):
        assert all(torch.equal(batch.cpu(), source) for batch, source in zip(epoch, batches, strict=False))
    assert len(list(loader)) == len(batches)


def test_a_step_timer_survives_an_event_that_fails() -> None:
    counter = MfuCounter(device="cuda")
    with (
        failing("cudaEventRecordWithFlags", 1, LAUNCH_OUT_OF_RESOURCES),
        pytest.raises(RuntimeError, match="cudaEventRecord"),
        counter.step(samples=1),
    ):
        pass
    for _ in range(3):
        with counter.step(samples=1):
            torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    assert counter.steps == 3


def test_every_step_on_a_broken_context_raises() -> None:
    script = f"""
import os, torch, flatout, flatout.optim
from flatout.data import Prefetcher
from flatout.mfu import MfuCounter
from tests.emulated_cuda.faults import failing

model = torch.nn.Linear(4, 4).cuda()
optimizer = flatout.optim.AdamW(model.parameters())
counter = MfuCounter(device="cuda")
loader = Prefetcher([torch.ones(2, 4)] * 4, "cuda")
iterator = iter(loader)
errors = 0
broken = failing("cudaLaunchKernel", 1, {ILLEGAL_ADDRESS}, is_sticky=True)
for step in range(4):
    if step == 1:
        broken.__enter__()
    try:
        with counter.step(samples=2):
            model(next(iterator)).sum().backward()
            optimizer.step()
    except RuntimeError:
        errors += 1
print(errors, flush=True)
os._exit(0)  # torch ends the process when one of its events is freed on a broken context
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (0, "3\n"), process.stderr

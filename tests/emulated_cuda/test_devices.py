"""Devices on which flatout makes a context. A context lives until its process ends, so each test has a new process."""

from __future__ import annotations

import pytest

from tests.emulated_cuda.record import needs_emulated_devices
from tests.helpers import run_script

pytestmark = needs_emulated_devices

HAS_CONTEXT = """
import ctypes
def has_context(device):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)
"""


def test_training_on_the_second_device_takes_no_memory_of_the_first() -> None:
    run_script(
        HAS_CONTEXT
        + """
import threading, torch, flatout, flatout.optim
from flatout.amp import GradScaler
from flatout.mfu import MfuCounter

device = torch.device("cuda", 1)
counter = MfuCounter(device=device, phases_every=1)

def train():
    scaler = GradScaler("cuda")
    with counter.step():  # before torch has made a device current in this thread
        model = torch.nn.Linear(8, 4).to(device)
        optimizer = flatout.optim.AdamW(model.parameters())
    for batch in [torch.randn(16, 8) for _ in range(5)]:
        with counter.step(samples=16):
            scaler.scale(model(batch.to(device)).square().mean()).backward()
            scaler.step(optimizer, max_grad_norm=1.0)
            scaler.update()
            optimizer.zero_grad()

thread = threading.Thread(target=train)
thread.start()
thread.join()
torch.cuda.synchronize(device)
assert counter.steps == 6
assert has_context(1)
assert not has_context(0)
assert torch.cuda.current_device() == 0
"""
    )


@pytest.mark.xfail(
    strict=True, reason="leaving torch.cuda.stream(...) sets the first device again, which makes a context"
)
@pytest.mark.parametrize("techniques", [{}, {"fused_optimizer": True, "cuda_graph": True}], ids=["torch", "graph"])
def test_an_optimized_training_takes_no_memory_of_the_first(techniques: dict[str, bool]) -> None:
    """Train with SGD. torch's Adam asks if the current stream is capturing, which makes a context on its device."""
    run_script(
        HAS_CONTEXT
        + f"""
from tests.gpu.trainings import Setup, optimize, train
train(optimize(Setup("convolutions", "sgd"), {techniques}, device="cuda:1"), 2)
assert not has_context(0), "a context on the first device"
"""
    )


def test_a_copy_to_the_second_device_takes_no_memory_of_the_first() -> None:
    run_script(
        HAS_CONTEXT
        + """
import threading, torch
from flatout.native import _host

source, target = torch.arange(8.0), torch.empty(8, device="cuda:1")  # the fill of torch.zeros could run after the copy

def copy():  # this thread and the threads of the stager have no context
    stager = _host.Stager(_host.Ring(device=1), device=1, helpers=1)
    transfer = source.data_ptr(), target.data_ptr(), source.nbytes
    stager.copy([transfer], False, _host.create_stream(1), 0, None).wait()
    stager.close()

thread = threading.Thread(target=copy)
thread.start()
thread.join()
assert torch.equal(target.cpu(), source)
assert has_context(1)
assert not has_context(0)
"""
    )


def test_the_current_device_stays_current() -> None:
    run_script(
        """
import torch, flatout
from flatout.data import Prefetcher
from flatout.mfu import MfuCounter

on_first = torch.ones(3, device="cuda:0")
counter = MfuCounter(device="cuda:1")
for batch in Prefetcher([torch.ones(3)] * 3, "cuda:1"):
    with counter.step():
        batch.add_(1)
    assert torch.ones(1, device="cuda").device.index == 0
    on_first.add_(1)
assert (on_first == 4).all()
"""
    )


def test_a_forked_child_leaves_the_events_of_its_parent_alone() -> None:
    process = run_script(
        """
import gc, os, torch
from flatout.mfu import MfuCounter

counter = MfuCounter(device="cuda:0")
with counter.step():
    torch.ones(3, device="cuda:0")
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    del counter
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )
    assert process.stderr == ""  # the emulated runtime reports each call of a forked child

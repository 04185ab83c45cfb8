"""Profiles of real GPU training: figures that only a device and its driver can give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.core.main_program import MainFile
from flatout.profile import profile_run
from flatout.profile.record import ProfileRecording
from flatout.profile.script import run_course

OFF = {"compile": False, "precision": False, "workers": False, "in_memory": False}
SCRIPT = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(20):
    x = torch.randn(256, 512).cuda()
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    loss.item()
"""


def make(loss_fn: object = functional.cross_entropy) -> flatout.Run:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 10, (4096,)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return flatout.optimize(model, DataLoader(data, batch_size=256), opt, loss_fn, budget=0, techniques=OFF)


def test_the_phases_are_the_step_and_the_operators_have_kernels(tmp_path: Path) -> None:
    mode = torch.cuda.get_sync_debug_mode()
    profile = make().profile(steps=5, warmup=3)
    assert torch.cuda.get_sync_debug_mode() == mode
    assert sum(profile.phases.values()) == pytest.approx(profile.seconds)
    assert min(profile.phases[phase] for phase in ("forward", "backward", "update")) > 0
    assert profile.device_busy is not None
    assert 0 < profile.device_busy <= 1
    assert profile.operators[0].device_seconds > 0
    kernels = sum(operator.device_seconds for operator in profile.operators)
    assert kernels <= 1.01 * (profile.profiled_seconds or 0.0)
    weights = 4 * (512 * 2048 + 2048 * 10)
    assert profile.memory_peak is not None
    assert profile.memory_peak > 4 * weights  # weights, gradients and two moments
    profile.to_chrome_trace(tmp_path / "trace.json")
    kinds = {event.get("cat") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert kinds >= {"kernel", "cpu_op"}


def test_a_wait_is_found_at_its_line() -> None:
    def waits(output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(output, target)
        loss.item()  # the sync
        torch.cuda.synchronize()  # the wait
        return loss

    profile = make(waits).profile(steps=3, warmup=2)
    lines = Path(__file__).read_text().splitlines()
    for mark in ("# the sync", "# the wait"):
        line = next(number for number, text in enumerate(lines, 1) if text.endswith(mark))
        (sync,) = [sync for sync in profile.syncs if sync.where.endswith(f"test_profile.py:{line}")]
        assert (sync.phase, sync.per_step) == ("forward", 1)


def test_a_script_has_its_copies_and_its_syncs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    recording = ProfileRecording(steps=5, warmup=2)
    ended = run_course(MainFile(str(path), []), recording.course(), stop=True)
    assert ended.error is None
    profile = recording.profile()
    assert min(profile.phases[phase] for phase in ("h2d", "forward", "backward", "update")) > 0
    assert "train.py:11" in {sync.where for sync in profile.syncs}


def test_kernels_of_a_cuda_graph_count_as_work() -> None:
    x = torch.ones(512, 512, device="cuda")
    torch.mm(x, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            torch.mm(x, x)
    profile = profile_run([x] * 99, lambda batch: graph.replay(), steps=3, warmup=1)
    assert profile.device_busy is not None
    assert profile.device_busy > 0

"""Profiles of real GPU training: figures that only a device and its driver can give."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.core.main_program import MainFile
from flatout.profile import Profile, nsight
from flatout.profile.gaps import busy, gaps
from flatout.profile.script import capture_script, profile_script
from flatout.profile.trace import Trace

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


def traced(profile: Profile) -> Trace:
    assert profile.trace is not None
    return Trace.read(profile.trace.path)


def test_every_phase_has_kernels_and_the_gaps_are_what_is_left() -> None:
    mode = torch.cuda.get_sync_debug_mode()
    profile = make().profile(steps=5, warmup=3)
    assert torch.cuda.get_sync_debug_mode() == mode
    assert min(profile.device_phases[phase] for phase in ("forward", "backward", "update")) > 0
    trace = traced(profile)
    worked = sum(end - start for start, end in busy(trace))
    idle = sum(gap.end - gap.start for gap in gaps(trace))
    assert worked + idle == pytest.approx(trace.end - trace.start)
    assert profile.device_busy == pytest.approx(min(1.0, 1e-6 * worked / trace.steps / profile.seconds), abs=1e-3)
    assert sum(profile.phases.values()) == pytest.approx(profile.seconds)
    assert min(profile.phases[phase] for phase in ("forward", "backward", "update")) > 0
    assert profile.memory is not None
    assert profile.memory.device == "cuda:0"


def test_a_wait_is_found_at_its_line_and_blamed_for_the_gap() -> None:
    def waits(output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(output, target)
        loss.item()  # the sync
        time.sleep(0.02)
        return loss

    profile = make(waits).profile(steps=3, warmup=2)
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# the sync"))
    assert any(sync.where.endswith(f"test_profile.py:{line}") for sync in profile.syncs)
    worst = profile.gaps[0]
    assert (worst.cause, worst.phase) == ("sync", "forward")
    assert worst.seconds > 0.015
    assert "test_profile.py:" in worst.where


def test_a_script_has_its_copies_and_its_syncs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    recording, ended = profile_script(MainFile(str(path), []), steps=5, warmup=2, keep_going=False)
    assert ended.error is None
    profile = recording.profile(commands=nsight.commands(str(path), [], 5, 2))
    assert min(profile.phases[phase] for phase in ("h2d", "forward", "backward", "update")) > 0
    assert profile.device_phases["h2d"] > 0
    assert "train.py:12" in {sync.where for sync in profile.syncs}
    assert [command.split()[0] for command in profile.commands] == ["nsys", "ncu"]
    assert "{kernel}" not in profile.commands[1]


def test_a_capture_without_a_tool_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    ended = capture_script(MainFile(str(path), []), steps=2, warmup=2)
    assert (ended.status, ended.error, ended.updates) == (0, None, 4)
    assert not torch.autograd._profiler_enabled()

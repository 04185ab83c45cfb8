"""NVTX ranges, recorded by a real tool of the NVTX protocol. Without a tool, no range is recorded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from flatout.mfu import MfuCounter, ranges
from flatout.native import _host

RECORDER = Path(__file__).parents[1] / "native" / "nvtx_recorder.cpp"

TRAINING = """
import torch, flatout
from flatout.mfu import MfuCounter
model = torch.nn.Linear(4, 1)
batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = flatout.optimize(model, batches, optimizer, torch.nn.functional.mse_loss, budget=0)
with flatout.mfu.nvtx_range("mine"):
    for batch in run.loader:
        run.step(batch)
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    headers = [Path(root) / "include" for root in roots if root and (Path(root) / "include" / "nvtx3").is_dir()]
    if not _host.built_with_cuda or not headers:
        pytest.skip("needs a build with CUDA and the toolkit's NVTX headers")
    library = tmp_path_factory.mktemp("nvtx") / "recorder.so"
    compiler = shutil.which("g++") or "c++"
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{headers[0]}", "-o", library, RECORDER, "-ldl"], check=True)
    return library


@pytest.mark.slow
def test_step_phases_and_stages_are_ranges(tool: Path, tmp_path: Path) -> None:
    heard = tmp_path / "heard.txt"
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(tool), "NVTX_RECORDER": str(heard)}
    subprocess.run([sys.executable, "-c", TRAINING], env=environment, check=True, timeout=300)
    lines = heard.read_text().splitlines()
    assert "flatout: applying rules" in lines
    begun = lines.index("mine")
    step = ["  flatout.loader_wait", "  flatout.step"]
    step += [f"    flatout.{phase}" for phase in ("h2d", "forward", "backward", "update")]
    assert [line for line in lines[begun + 1 :] if "flatout." in line] == [*step, *step, "  flatout.loader_wait"]


def test_nobody_listens_here() -> None:
    assert not _host.nvtx_listens()


def test_ranges_are_shown_elsewhere_within_a_block_and_nowhere_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def show(name: str) -> AbstractContextManager[object]:
        shown.append(name)
        return nullcontext()

    counter = MfuCounter()
    with ranges.ranges_shown_as(show), counter.step() as step, step.phase("forward"):
        pass
    assert shown == ["flatout.step", "flatout.forward"]
    monkeypatch.setattr(ranges, "nvtx_range", show)
    monkeypatch.setattr(ranges, "_make_range", show)
    with counter.step() as step, step.phase("forward"):
        pass
    assert len(shown) == 2

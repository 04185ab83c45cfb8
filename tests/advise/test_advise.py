"""``flatout advise``: names planted causes by file and line, and ends the script cleanly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
PLANTED = ("starved_loader", "sync_in_loop", "fp32_matmuls", "tiny_batches", "evaluation_with_gradients")

TRAINING = """
import atexit, sys
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(lambda: print("at exit"))
def train(updates):
    for _ in range(updates):
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(4, 8))
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
"""


class Done(NamedTuple):
    status: int
    stdout: str
    advice: dict[str, Any]


def advise(script: Path, *options: str, seconds: float = 8) -> Done:
    command = [sys.executable, "-m", "flatout", "advise", "--seconds", str(seconds), "--json", "advice.json", *options]
    done = subprocess.run(
        [*command, script.name],
        cwd=script.parent,
        capture_output=True,
        text=True,
        env=os.environ | {"FLATOUT_CACHE": "off"},
        timeout=300,
        check=False,
    )
    file = script.parent / "advice.json"
    return Done(done.returncode, done.stdout, json.loads(file.read_text()) if file.exists() else {})


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def causes_of(advice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(cause["code"], cause["where"]) for cause in advice["causes"]]


def boxes_of(advice: dict[str, Any]) -> dict[str, bool | None]:
    return {box["name"]: box["is_ticked"] for box in advice["boxes"]}


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0, 2, 4])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_cause_is_named(planted, busy, tmp_path):
    script = Path(shutil.copy(SCRIPTS / f"{planted}.py", tmp_path))
    before = script.read_text()
    line = 1 + next(i for i, text in enumerate(before.splitlines()) if text.endswith("# planted"))
    with busy_loops(busy):
        done = advise(script, "--only", "precision")
    assert done.status == 0
    assert (planted, f"{script.name}:{line}") in causes_of(done.advice)
    assert script.read_text() == before
    if planted in ("starved_loader", "evaluation_with_gradients"):
        subprocess.run(["patch", "-p1"], input=done.advice["diff"], text=True, cwd=tmp_path, check=True)
        assert script.read_text() != before
        compile(script.read_text(), script.name, "exec")


def test_a_patched_script_no_longer_has_the_cause(tmp_path):
    script = Path(shutil.copy(SCRIPTS / "evaluation_with_gradients.py", tmp_path))
    diff = advise(script, "--only", "precision").advice["diff"]
    subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=tmp_path, check=True)
    advice = advise(script, "--only", "precision").advice
    assert "evaluation_with_gradients" not in dict(causes_of(advice))
    assert boxes_of(advice)["evaluation"] is True


def test_a_script_without_these_causes_has_none_of_them(tmp_path):
    done = advise(written(tmp_path, f"{TRAINING}train(10**9)"), "--only", "precision", seconds=3)
    assert {"starved_loader", "sync_in_loop", "evaluation_with_gradients"}.isdisjoint(dict(causes_of(done.advice)))
    assert boxes_of(done.advice)["evaluation"] is True
    assert boxes_of(done.advice)["loading"] is None


def test_a_script_is_ended_with_its_finally_blocks_and_functions_at_exit(tmp_path):
    text = f"{TRAINING}\ntry:\n    train(10**9)\nfinally:\n    print('finally')\nprint('unreachable')"
    done = advise(written(tmp_path, text), "--only", "precision", seconds=2)
    assert done.status == 0
    assert {"finally", "at exit"} <= set(done.stdout.splitlines())
    assert "unreachable" not in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise KeyError", 1)], ids=["returns", "exits", "raises"]
)
def test_a_script_that_ends_earlier_has_its_own_status(end, status, tmp_path):
    done = advise(written(tmp_path, f"{TRAINING}train(4)\n{end}"), "--only", "precision")
    assert done.status == status
    assert done.advice["updates"] == 4


def test_a_script_that_trains_nothing_gets_no_advice(tmp_path):
    done = advise(written(tmp_path, "import torch"))
    assert done.status == 0
    assert done.advice["causes"] == []


def test_a_module_is_advised_on(tmp_path):
    script = Path(shutil.copy(SCRIPTS / "tiny_batches.py", tmp_path))
    module = script.with_suffix("")
    assert ("tiny_batches", "tiny_batches.py:11") in causes_of(advise(module, "--only", "precision", "-m").advice)

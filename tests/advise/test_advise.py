"""``flatout advise``: locates planted causes by file and line, and ends the script cleanly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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


ALL = """
import subprocess, sys
from flatout.cli import main
loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(int(sys.argv[1]))]
try:
    for name in sys.argv[2:]:
        assert main(["advise", "--seconds", "20", "--only", "precision", "--json", f"{name}.json", f"{name}.py"]) == 0
finally:
    for loop in loops:
        loop.kill()
"""
"""Advice on several scripts, one after another, while busy loops run on other cores."""


class Done(NamedTuple):
    status: int
    stdout: str
    advice: dict[str, Any]


def advise(script: Path, *options: str, seconds: float = 20) -> Done:
    names = ["--seconds", str(seconds), "--only", "precision", "--json", "advice.json", *options, script.name]
    done = started("-m", "flatout", "advise", *names, folder=script.parent)
    file = script.parent / "advice.json"
    return Done(done.returncode, done.stdout, json.loads(file.read_text()) if file.exists() else {})


def started(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"FLATOUT_CACHE": "off"},
        timeout=300,
        check=False,
    )


def causes_of(advice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(cause["code"], cause["where"]) for cause in advice["causes"]]


def boxes_of(advice: dict[str, Any]) -> dict[str, bool | None]:
    return {box["name"]: box["is_ticked"] for box in advice["boxes"]}


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.fixture(
    scope="module",
    params=[4, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)],
    ids="{} busy loops".format,
)
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the scripts and the advice on each, measured while other processes used the cores."""
    folder = tmp_path_factory.mktemp("planted")
    for name in PLANTED:
        shutil.copy(SCRIPTS / f"{name}.py", folder)
    done = started("-c", ALL, str(request.param), *PLANTED, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named(name, planted):
    script = planted / f"{name}.py"
    assert script.read_text() == (SCRIPTS / script.name).read_text()
    line = 1 + next(i for i, text in enumerate(script.read_text().splitlines()) if text.endswith("# planted"))
    assert (name, f"{script.name}:{line}") in causes_of(json.loads((planted / f"{name}.json").read_text()))


def test_the_slow_part_of_a_starved_loader_is_named(planted):
    advice = json.loads((planted / "starved_loader.json").read_text())
    stage = advice["stages"][0]
    line = 1 + next(
        i for i, text in enumerate((SCRIPTS / "starved_loader.py").read_text().splitlines()) if "sin" in text
    )
    assert (stage["name"], stage["place"]) == ("transform", f"starved_loader.py:{line}")
    assert stage["share"] > 0.5


def test_a_patched_script_no_longer_has_the_cause(planted, tmp_path):
    name = "evaluation_with_gradients"
    script = Path(shutil.copy(planted / f"{name}.py", tmp_path))
    diff = json.loads((planted / f"{name}.json").read_text())["diff"]
    subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=tmp_path, check=True)
    done = advise(script, "--diff", "left.diff")
    assert name not in dict(causes_of(done.advice))
    assert boxes_of(done.advice)["evaluation"] is True
    assert (tmp_path / "left.diff").read_text() == done.advice["diff"]


def test_a_script_without_these_causes_is_ended_with_its_finally_blocks_and_functions_at_exit(tmp_path):
    text = f"{TRAINING}\ntry:\n    train(10**9)\nfinally:\n    print('finally')\nprint('unreachable')"
    done = advise(written(tmp_path, text), seconds=1)
    assert {"starved_loader", "sync_in_loop", "evaluation_with_gradients"}.isdisjoint(dict(causes_of(done.advice)))
    assert boxes_of(done.advice)["evaluation"] is True
    assert boxes_of(done.advice)["loading"] is None
    assert done.status == 0
    assert {"finally", "at exit"} <= set(done.stdout.splitlines())
    assert "unreachable" not in done.stdout.splitlines()


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise KeyError", 1)], ids=["exits", "raises"])
def test_a_script_that_ends_earlier_has_its_own_status(end, status, tmp_path):
    done = advise(written(tmp_path, f"{TRAINING}train(4)\n{end}"))
    assert done.status == status
    assert done.advice["updates"] == 4


def test_a_script_that_trains_nothing_gets_no_advice(tmp_path):
    done = advise(written(tmp_path, "import torch"))
    assert done.status == 0
    assert done.advice["causes"] == []


def test_a_module_is_advised_on(tmp_path):
    script = Path(shutil.copy(SCRIPTS / "tiny_batches.py", tmp_path))
    module = script.with_suffix("")
    assert ("tiny_batches", "tiny_batches.py:11") in causes_of(advise(module, "-m").advice)

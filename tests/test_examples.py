"""Scripts of the folder examples, each run at a small size in a new process."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.frameworks import imported

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))

PYTHON = (sys.executable,)
FLATOUT_RUN = (sys.executable, "-m", "flatout", "run", "--plan", "none")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Variable for scripts whose results must repeat, and for two processes on a machine with one GPU."""

ROUNDING = 1e-4
"""Largest relative difference of losses that sum in another order."""


class Output(str):
    """Standard output of a script."""

    def figure(self, pattern: str) -> float:
        """Return the number after the only match of a pattern."""
        (found,) = self.figures(pattern)
        return found

    def figures(self, pattern: str) -> list[float]:
        """Return the finite numbers after each match of a pattern."""
        found = [float(number) for number in re.findall(rf"{pattern}[ ']+([-+.\de]+|nan|inf)", self)]
        assert all(map(math.isfinite, found)), self
        return found


def ran(folder: Path, name: str, *arguments: str, command: Sequence[str] = PYTHON, **variables: str) -> Output:
    """Run a script in a folder, without measurements. The script must end with status 0 within five minutes."""
    ended = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "FLATOUT_BUDGET": "0", "FLATOUT_PROGRESS": "0", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return Output(ended.stdout)


def needs(*packages: str) -> None:
    """Skip without these packages. Only the script imports them, because some take seconds."""
    imported("torch")  # skips with a torchvision for another torch, which all frameworks import
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")


def has_receipt(output: str) -> bool:
    """Return True if a receipt was printed. Its last line has the version of torch."""
    return f"torch {torch.__version__}" in output


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    needs("sklearn")
    output = ran(tmp_path, "digits.py", "--epochs", "3")
    losses = output.figures(r"epoch \d: loss")
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]
    assert output.figure("accuracy") > 80
    assert has_receipt(output)


@pytest.mark.slow
def test_gpt(tmp_path: Path) -> None:
    output = ran(tmp_path, "gpt.py", "--epochs", "2")
    first, second = output.figures(r"epoch \d: last loss")
    assert second < first
    assert output.figure("held-out loss") < 4  # bits per byte, 8 for a model that has learned nothing
    assert has_receipt(output)


@pytest.mark.slow
def test_images_resume(tmp_path: Path) -> None:
    """A training in two processes ends like a training in one, also with another number of loader workers."""
    needs("torchvision", "sklearn")
    size = ("--steps", "4", "--batch-size", "8", "--model", "shufflenet_v2_x0_5")
    resumed, whole = ("--checkpoints", "resumed"), ("--checkpoints", "whole")
    first = ran(tmp_path, "train_images.py", *size, *resumed, "--epochs", "1", **ON_CPU)
    second = ran(tmp_path, "train_images.py", *size, *resumed, "--epochs", "2", **ON_CPU)
    at_once = ran(tmp_path, "train_images.py", *size, *whole, "--epochs", "2", "--workers", "0", **ON_CPU)
    assert [updates(output) for output in (first, second, at_once)] == [(4, 4), (4, 8), (8, 8)]

    losses = at_once.figures(r"epoch \d: loss")
    assert len(set(losses)) == 2
    assert first.figures(r"epoch \d: loss") == pytest.approx(losses[:1], rel=ROUNDING)
    assert second.figures(r"epoch \d: loss") == pytest.approx(losses, rel=ROUNDING)
    assert has_receipt(second)


@pytest.mark.slow
def test_image_folder(tmp_path: Path) -> None:
    """Losses do not depend on what the loader keeps in memory."""
    needs("torchvision")
    size = ("--images", "64", "--epochs", "2", "--batch-size", "16", "--size", "32", "--model", "shufflenet_v2_x0_5")
    plain = ran(tmp_path, "images.py", *size, **ON_CPU)
    losses = plain.figures(r"epoch \d: loss")
    assert len(set(losses)) == 2
    script = (EXAMPLES / "images.py").read_text(encoding="utf-8")
    forced = 'techniques={"prefix_cache": True}, expected_steps'
    (tmp_path / "images.py").write_text(script.replace("expected_steps", forced), encoding="utf-8")
    kept = ran(tmp_path, str(tmp_path / "images.py"), *size, **ON_CPU)
    assert kept.figures(r"epoch \d: loss") == losses
    assert has_receipt(kept)


def updates(output: str) -> tuple[int, int]:
    """Return the number of updates in a process, and with those of earlier processes."""
    ((here, total),) = re.findall(r"(\d+) of (\d+) updates", output)
    return int(here), int(total)


@pytest.mark.slow
def test_pretraining(tmp_path: Path) -> None:
    output = ran(tmp_path, "pretrain_gpt.py", "--steps", "20", "--batch-size", "8", "--accumulate", "2")
    losses = output.figures(r"batch \d+: loss")
    assert len(losses) == 10
    assert output.figure("last loss") < 0.8 * losses[0]
    assert output.figure("learning rate") == 2e-4  # the schedule's end, after one step for each update
    assert has_receipt(output)


@pytest.mark.slow
def test_transformers(tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    output = ran(tmp_path, "finetune_transformers.py", "--steps", "40", "--batch-size", "16")
    losses = output.figures("'loss':")
    assert len(losses) == 4
    assert losses[-1] < 0.95 * losses[0]
    assert output.figure("held-out loss") < 0.68  # log(2) for a model that has learned nothing
    assert "None" not in output.splitlines()  # the report of a training that flatout did not see


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    needs("lightning", "sklearn")
    output = ran(tmp_path, "lightning_autoencoder.py", "--epochs", "3", "--steps", "15")
    losses = output.figures("train_loss")
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]
    assert output.figure("\nvalidation loss") < 0.1
    assert "None" not in output.splitlines()


@pytest.mark.slow
def test_two_processes_end_like_one(tmp_path: Path) -> None:
    needs("sklearn")
    size = ("--epochs", "2", "--steps", "8", "--batch-size", "31")  # the processes have slices of 16 and 15 samples
    one = ran(tmp_path, "several_gpus.py", *size, **ON_CPU)
    two = ran(tmp_path, "several_gpus.py", *size, command=TORCHRUN, **ON_CPU)
    for pattern in (r"epoch \d: loss", "held-out loss"):
        losses = one.figures(pattern)
        assert losses
        assert two.figures(pattern) == pytest.approx(losses, rel=ROUNDING)
    first, second = one.figures(r"epoch \d: loss")
    assert second < 0.97 * first
    assert ("data_parallel" in one, "data_parallel" in two) == (False, True)
    assert has_receipt(two)


@pytest.mark.slow
def test_flatout_run(tmp_path: Path) -> None:
    needs("sklearn")
    size = ("--epochs", "10", "--steps", "20")
    output = ran(tmp_path, "vae.py", *size, command=FLATOUT_RUN, FLATOUT_BUDGET="60")
    losses = output.figures(r"epoch \d+: loss")
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    assert json.loads((tmp_path / "flatout-report.json").read_text())["updates"] == 200


def test_every_script_has_a_test_and_a_row() -> None:
    tested = set(re.findall(r'ran\(tmp_path, "(\w+\.py)"', Path(__file__).read_text()))
    rows = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) ", (EXAMPLES / "README.md").read_text(), re.M)
    assert tested == set(SCRIPTS)
    assert sorted(rows) == [(name, name) for name in SCRIPTS]


@pytest.mark.parametrize("name", SCRIPTS)
def test_documented_commands_have_options_of_the_script(name: str) -> None:
    source = (EXAMPLES / name).read_text()
    text = (ast.get_docstring(ast.parse(source)) or "") + (EXAMPLES / "README.md").read_text()
    commands = re.findall(rf"examples/{name}(.*)", text)
    assert len(commands) > 2, name
    for command in commands:
        for option in re.findall(r"--[\w-]+", command.partition("#")[0]):
            assert f'add_argument("{option}"' in source, command

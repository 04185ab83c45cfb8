"""Scripts of all kinds under ``python`` and ``flatout run``: equal exit status, output and losses, but tuned."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flatout.autotune.module_tuning import FIRST_UPDATES
from flatout.tuning.budget import SHARE
from tests.frameworks import imported

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent

PLAIN = [sys.executable]
UNDER_FLATOUT = [sys.executable, "-m", "flatout", "run", "--plan", "none"]
RESEEDED = ["channels_last", "compile"]
"""Techniques after which dropout draws other numbers, so that losses step by step cannot be compared."""

TOLERANCE = 0.05
"""Largest difference of a loss with techniques in use, relative to the loss or to 1, whichever is larger."""


@dataclass(frozen=True)
class Kind:
    """Kind of script.

    Attributes:
        tuned: classes of the modules that are tuned. The report has one of them, and others if there is time.
        count: largest number of tuned modules, if modules of a tuned class are not tuned.
        packages: imports of the script, except torch and numpy.
    """

    tuned: tuple[str, ...]
    count: int = 2
    packages: tuple[str, ...] = ()


KINDS = {
    "accelerate_loop": Kind(("Sequential",), packages=("accelerate",)),
    "dcgan": Kind(("Discriminator", "Generator")),
    "ddpm": Kind(("Denoiser",)),
    "finetune": Kind(("Classifier",)),
    "gcn": Kind(("GCN",)),
    "gradient_penalty": Kind(("Sequential",), count=1),  # the critic is differentiated twice
    "hf_trainer": Kind(("GPT2LMHeadModel",), packages=("transformers", "accelerate")),
    "imagenet": Kind(("ResNet",), packages=("torchvision",)),
    "lbfgs": Kind(("Sequence",)),
    "lightning_module": Kind(("LitAutoEncoder",), packages=("lightning",)),
    "mingpt": Kind(("GPT",)),
    "mnist": Kind(("Net",)),
    "nanogpt": Kind(("GPT",)),
    "policy_gradient": Kind(("Policy",)),
    "siamese": Kind(("SiameseNetwork",)),
    "timm_train": Kind(("ClassificationTask",), packages=("timm", "torchvision")),
    "unet": Kind(("UNet",)),
    "vae": Kind(("VAE",)),
    "word_lstm": Kind(("RNNModel",)),
}

ENOUGH_STEPS = math.ceil(1.5 * FIRST_UPDATES / SHARE)
"""Updates after which the allowance suffices for a first turn, however long an update takes."""


class Ran(NamedTuple):
    """Result of a script.

    Attributes:
        status: exit status.
        losses: losses of each update.
        shape: output without numbers.
        report: JSON report of ``flatout run``, empty without a report.
        errors: stderr.
    """

    status: int
    losses: list[dict[str, float]]
    shape: list[str]
    report: dict[str, Any]
    errors: str


def ran(name: str, command: Sequence[str], folder: Path, *args: str) -> Ran:
    """Run a script with arguments in a new folder."""
    folder.mkdir()
    done = subprocess.run(
        [*command, str(FOLDER / f"{name}.py"), *args],
        cwd=folder,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    updates = [json.loads(line) for line in lines if line.startswith('{"step"')]
    losses = [{key: value for key, value in update.items() if key != "at"} for update in updates]
    report = folder / "flatout-report.json"
    return Ran(
        done.returncode,
        losses,
        [re.sub(r"-?[\d.]+(e-?\d+)?", "#", line) for line in lines],
        json.loads(report.read_text()) if report.exists() else {},
        done.stderr,
    )


def tuned_modules(kind: Kind, script: Ran) -> list[str]:
    """Return the modules of the report, which must all belong to the script."""
    modules = [each["module"] for each in script.report.get("modules", [])]
    assert set(modules) <= set(kind.tuned)
    assert len(modules) <= kind.count
    return modules


def worst(losses: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """Return the largest difference of a loss, relative to the loss or to 1."""
    pairs = [(update[key], value) for update, want in zip(losses, expected, strict=True) for key, value in want.items()]
    return max(abs(one - other) / max(abs(other), 1.0) for one, other in pairs)


@pytest.mark.parametrize("name", KINDS)
def test_a_script_trains_as_by_python_and_is_tuned(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    for package in kind.packages:
        imported(package)
    plain = ran(name, PLAIN, tmp_path / "plain")
    assert plain.status == 0, plain.errors
    assert plain.losses

    dry = ran(name, [*UNDER_FLATOUT, "--dry-run"], tmp_path / "dry")
    assert dry.status == 0, dry.errors
    assert dry.shape == plain.shape
    assert dry.losses == plain.losses

    kept = ran(name, [*UNDER_FLATOUT, "--without", ",".join(RESEEDED)], tmp_path / "kept")
    assert kept.status == 0, kept.errors
    assert kept.shape == plain.shape
    assert worst(kept.losses, plain.losses) <= TOLERANCE

    if not tuned_modules(kind, dry) + tuned_modules(kind, kept):  # a slow machine had no time for a first turn
        long = ran(name, UNDER_FLATOUT, tmp_path / "long", "--steps", str(ENOUGH_STEPS))
        assert tuned_modules(kind, long), long.errors


def test_every_script_is_run() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"run_log", Path(__file__).stem, "__init__"}
    assert scripts == set(KINDS)

"""Claim: ``flatout run`` makes scripts of twelve kinds faster, unchanged: 1.5 times in the geometric mean on a CPU.

    python -m pytest benchmarks/scripts.py -s --benchmark-json=benchmarks/results/scripts.json

The scripts are those of tests/foreign_scripts, at ``--size real``. Each has as many updates as ``python`` makes in
``SECONDS``. Whole runs by ``python`` and by ``flatout run --plan none`` take turns, in a random order in each round.
The pace of a run is that of its last half, by the median time of an update: a turn of tuning is not part of it. The
ratio of the paces has a 95 % interval over the rounds. Beside it stand the time of whole processes, tuning and imports
included, and the time and the updates from the first update to the first gain that a race has shown. Goals: at least
0.97 by the lower end of each interval, and a first gain within 60 s or 100 updates.

``FLATOUT_BENCH_SHRINK=10`` takes a tenth of the time, and two rounds. A script whose package is missing is skipped.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.intervals import gain
from support.machine_facts import machine_facts

SHRINK = int(os.environ.get("FLATOUT_BENCH_SHRINK", "1"))
ROUNDS = 5 if SHRINK == 1 else 2
SECONDS = 30.0 / SHRINK
"""Time of the updates of a run by ``python``."""

PROBE = 16
"""Updates of the run that tells the pace of a script."""

FOLDER = Path(__file__).parents[1] / "tests" / "foreign_scripts"

PACKAGES = {
    "nanogpt": (),
    "mnist": (),
    "word_lstm": (),
    "imagenet": ("torchvision",),
    "siamese": (),
    "vae": (),
    "dcgan": (),
    "unet": (),
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning",),
    "ddpm": (),
    "gcn": (),
}
"""What each script imports beyond torch and numpy."""

ratios: dict[str, float] = {}
"""Ratio of the paces of each script that has run."""


@dataclass(frozen=True)
class ScriptRun:
    """A run of a script.

    Attributes:
        ends: times at which its updates ended, in seconds.
        seconds: time of the whole process.
        kept: techniques in use at the end, by module.
        first_gain: seconds and updates from the first update to the first verified gain; None without one.
    """

    ends: list[float]
    seconds: float
    kept: dict[str, list[str]]
    first_gain: dict[str, float] | None

    @property
    def pace(self) -> float:
        """Updates per second in the last half of the run."""
        last = self.ends[len(self.ends) // 2 :]
        return 1 / statistics.median(b - a for a, b in itertools.pairwise(last))


def run_script(name: str, steps: int, folder: Path, *, with_flatout: bool) -> ScriptRun:
    """Run a script to its end."""
    folder.mkdir()
    noted, report = folder / "gain.json", folder / "flatout-report.json"
    process = ["-m", "support.script_process", str(noted), "run", "--plan", "none"] if with_flatout else []
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *process, str(FOLDER / f"{name}.py"), "--size", "real", "--steps", str(steps)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_CACHE_DIR": str(folder / "code")},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line)["at"] for line in done.stdout.splitlines() if line.startswith('{"step"')]
    told: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {"modules": []}
    first = json.loads(noted.read_text()) if with_flatout else None
    return ScriptRun(
        ends,
        seconds,
        {each["module"]: each["report"]["won"] for each in told["modules"]},
        first and {"seconds": first["at"] - ends[0], "updates": first["update"]},
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_script(name: str, benchmark, tmp_path: Path) -> None:
    """Times the script by ``flatout run``; runs by ``python`` take turns with it and are in ``extra_info``."""
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    steps = math.ceil(SECONDS * run_script(name, PROBE, tmp_path / "probe", with_flatout=False).pace)
    runs: dict[str, list[ScriptRun]] = {"python": [], "flatout": []}
    order = random.Random(0)
    for i in range(ROUNDS):
        for side in order.sample(list(runs), len(runs)):
            runs[side].append(run_script(name, steps, tmp_path / f"{side}{i}", with_flatout=side == "flatout"))
    benchmark.pedantic(lambda: run_script(name, PROBE, tmp_path / "timed", with_flatout=True), rounds=1)
    found = gain({side: [run.pace for run in each] for side, each in runs.items()}, "flatout", "python")
    ratios[name] = found.ratio
    whole = {side: statistics.median(run.seconds for run in each) for side, each in runs.items()}
    firsts = [run.first_gain for run in runs["flatout"]]
    print(f"\n{name}: {found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f}), {steps:,} updates")
    print(f"  whole process {whole['python']:.1f} s by python, {whole['flatout']:.1f} s by flatout run")
    for run, first in zip(runs["flatout"], firsts, strict=True):
        after = f"{first['seconds']:.1f} s, {first['updates']:,} updates" if first else "none"
        print(f"  first gain after {after}; kept {run.kept}")
    benchmark.extra_info |= {
        "machine": machine_facts(),
        "updates": steps,
        "times as fast": [round(each, 3) for each in (found.ratio, found.low, found.high)],
        "updates/s": {side: [round(run.pace, 2) for run in each] for side, each in runs.items()},
        "whole process, seconds": {side: [round(run.seconds, 2) for run in each] for side, each in runs.items()},
        "first gain": firsts,
        "kept": [run.kept for run in runs["flatout"]],
    }


def test_mean(benchmark) -> None:
    """Notes the geometric mean of all scripts that have run."""
    if not ratios:
        pytest.skip("no script has run")
    mean = benchmark.pedantic(lambda: statistics.geometric_mean(ratios.values()), rounds=1)
    print(f"\n{mean:.2f}x in the geometric mean of {len(ratios)} scripts, {min(ratios.values()):.2f}x at least")
    benchmark.extra_info |= {"geometric mean": round(mean, 3), "scripts": len(ratios)}

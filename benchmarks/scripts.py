"""Claim: ``flatout run`` makes scripts of twelve kinds faster, unchanged: 1.5 times in the geometric mean on a CPU.

    python -m pytest benchmarks/scripts.py -s --benchmark-json=benchmarks/results/scripts.json

The scripts are those of tests/foreign_scripts, at ``--size real``. ``flatout run --plan none`` tunes a script for
``TUNING_SECONDS``, with what it has then. From then on the process and one of ``python`` take turns: one of them is
stopped while the other trains. A turn has the rate of all its updates, epochs' ends included. The ratio of the rates
has a 95 % interval over the pairs of turns. Beside it stand the time from the start of the process to the last update
before the turns, tuning and imports included, and the same for python, from its start and its rate. Goals: at least
0.97 by the lower end of each interval, and a first gain that a race has shown within 60 s or 100 updates.

``FLATOUT_BENCH_SHRINK=10`` takes a tenth of the time. A script whose package is missing is skipped.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.intervals import gain
from support.machine_facts import machine_facts

SHRINK = int(os.environ.get("FLATOUT_BENCH_SHRINK", "1"))
TUNING_SECONDS = 120.0 / SHRINK
WARMUP_SECONDS = 5.0
"""Time of python's updates before the turns."""

TURNS, TURN_SECONDS = 8, 3.0

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
"""Ratio of the rates of each script that has run."""


class ScriptProcess:
    """Script in a process group of its own, which can be stopped.

    Args:
        name: of the script.
        folder: for its files.
        seconds: from its first update to the end of ``prepare``.
        launcher: ``["python"]``, or ``["flatout", ...]``.

    Attributes:
        begun: when the process started.
        prepared: when ``prepare`` ended.
    """

    def __init__(self, name: str, folder: Path, seconds: float, *launcher: str) -> None:
        folder.mkdir()
        self._folder, self._errors = folder, (folder / "stderr").open("w+")
        self.begun = self.prepared = time.perf_counter()
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        script = [str(FOLDER / f"{name}.py"), "--size", "real", "--steps", str(10**9)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.script_process", str(folder), str(seconds), *launcher, *script],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_CACHE_DIR": str(folder / "code")},
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )

    def prepare(self) -> None:
        """Wait until the script has trained for its time, and stop it."""
        while not (self._folder / "ready").exists():
            self._check()
            time.sleep(0.1)
        self.prepared = time.perf_counter()
        self._signal(signal.SIGSTOP)

    def turn(self) -> tuple[float, float]:
        """Let the script train for a turn, and return when the turn began and ended."""
        self._signal(signal.SIGCONT)
        begun = time.perf_counter()
        time.sleep(TURN_SECONDS)
        self._signal(signal.SIGSTOP)
        self._check()
        return begun, time.perf_counter()

    def finish(self) -> dict[str, Any]:
        """End the script, and return what its process has seen."""
        self._process.send_signal(signal.SIGUSR2)
        self._signal(signal.SIGCONT)
        self._process.wait(60)
        return json.loads((self._folder / "seen.json").read_text())

    def kill(self) -> None:
        """End the script and its workers in any case."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _check(self) -> None:
        self._errors.seek(0)
        assert self._process.poll() is None, self._errors.read()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


@contextmanager
def script(name: str, folder: Path, seconds: float, *launcher: str) -> Iterator[ScriptProcess]:
    """Start a script, and end it with the block."""
    process = ScriptProcess(name, folder, seconds, *launcher)
    try:
        yield process
    finally:
        process.kill()


def rate(ends: list[float], turn: tuple[float, float]) -> float:
    """Return the updates per second from the first to the last update that ended in a turn."""
    inside = [end for end in ends if turn[0] < end < turn[1]]
    assert len(inside) > 2, "a turn is too short for this script"
    return (len(inside) - 1) / (inside[-1] - inside[0])


@pytest.mark.parametrize("name", PACKAGES)
def test_script(name: str, benchmark, tmp_path: Path) -> None:
    """Lets the script by ``flatout run`` and the script by ``python`` take turns, after the tuning."""
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    order = random.Random(0)
    sides: dict[str, ScriptProcess] = {}
    turns: dict[str, list[tuple[float, float]]] = {"python": [], "flatout": []}

    def race() -> dict[str, dict[str, Any]]:
        launcher = ("flatout", "run", "--plan", "none")
        with script(name, tmp_path / "flatout", TUNING_SECONDS, *launcher) as sides["flatout"]:
            sides["flatout"].prepare()
            with script(name, tmp_path / "python", WARMUP_SECONDS, "python") as sides["python"]:
                sides["python"].prepare()
                for _ in range(TURNS):
                    for side in order.sample(list(turns), len(turns)):
                        turns[side].append(sides[side].turn())
                return {side: process.finish() for side, process in sides.items()}

    seen = benchmark.pedantic(race, rounds=1)
    python, flatout = seen["python"], seen["flatout"]
    rates = {side: [rate(seen[side]["ends"], turn) for turn in turns[side]] for side in turns}
    found = gain(rates, "flatout", "python")
    ratios[name] = found.ratio
    tuned = [end for end in flatout["ends"] if end < sides["flatout"].prepared]
    whole = tuned[-1] - sides["flatout"].begun
    by_python = python["ends"][0] - sides["python"].begun + (len(tuned) - 1) / statistics.fmean(rates["python"])
    first = flatout["first gain"]
    print(f"\n{name}: {found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f})")
    print(f"  {len(tuned):,} updates in {whole:.0f} s by flatout run, {by_python:.0f} s by python")
    print(f"  tuned for {flatout['tuning seconds']:.1f} s; kept {flatout['kept']}")
    print("  first gain after " + (f"{first['seconds']:.1f} s, {first['updates']:,} updates" if first else "none"))
    benchmark.extra_info |= {
        "machine": machine_facts(),
        "times as fast": [round(each, 3) for each in (found.ratio, found.low, found.high)],
        "updates/s": {side: [round(each, 2) for each in measured] for side, measured in rates.items()},
        "updates with tuning": len(tuned),
        "seconds with tuning": {"python": round(by_python, 1), "flatout": round(whole, 1)},
        "tuning seconds": round(flatout["tuning seconds"], 2),
        "first gain": first,
        "kept": flatout["kept"],
    }


def test_mean(benchmark) -> None:
    """Notes the geometric mean of all scripts that have run."""
    if not ratios:
        pytest.skip("no script has run")
    mean = benchmark.pedantic(lambda: statistics.geometric_mean(ratios.values()), rounds=1)
    print(f"\n{mean:.2f}x in the geometric mean of {len(ratios)} scripts, {min(ratios.values()):.2f}x at least")
    benchmark.extra_info |= {"geometric mean": round(mean, 3), "scripts": len(ratios)}

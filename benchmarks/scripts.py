"""Claim: ``flatout run`` makes twelve kinds of unchanged scripts 1.5 times as fast on a CPU, in the geometric mean.

    pytest benchmarks/scripts.py -s --full

The benchmark runs the scripts of tests/foreign_scripts with ``--size real``. ``flatout run --plan none`` tunes a script
for ``TUNING_SECONDS``. After that, its process takes turns with a process of ``python``. One process is stopped while
the other trains. The rate of a turn counts all its updates, and includes the ends of epochs. The ratio of the rates has
a 95 % interval over the pairs of turns.

The results also contain the time from the start of the process to the last update before the turns, with imports and
tuning. For ``python``, this time is computed from its startup time and its rate. Goals: the lower bound of each
interval is at least 0.97, and a race shows a first gain within 60 s or 100 updates.

A script whose package is missing is skipped.
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
from support.scale import scaled

TUNING_SECONDS = scaled(120.0, 3.0)
WARMUP_SECONDS = scaled(5.0, 1.0)
"""Seconds of updates of ``python`` before the turns."""

TURNS, TURN_SECONDS = scaled((8, 3.0), (2, 0.5))

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
"""Packages that each script imports in addition to torch and numpy."""

ratios: dict[str, float] = {}
"""Ratio of the rates, by script."""


class ScriptProcess:
    """Script in a separate process group, which can be stopped and continued.

    Args:
        name: name of the script.
        folder: folder for the files of the process.
        seconds: time from the first update to the end of ``prepare``.
        launcher: ``["python"]``, or ``["flatout", ...]``.

    Attributes:
        begun: ``time.perf_counter()`` at the start of the process.
        prepared: ``time.perf_counter()`` at the end of ``prepare``.
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
        """Wait until the script has trained for ``seconds``, and stop the script."""
        while not (self._folder / "ready").exists():
            self._check()
            time.sleep(0.1)
        self.prepared = time.perf_counter()
        self._signal(signal.SIGSTOP)

    def turn(self) -> tuple[float, float]:
        """Let the script train for a turn, and return the begin and the end of the turn."""
        self._signal(signal.SIGCONT)
        begun = time.perf_counter()
        time.sleep(TURN_SECONDS)
        self._signal(signal.SIGSTOP)
        self._check()
        return begun, time.perf_counter()

    def finish(self) -> dict[str, Any]:
        """End the script, and return the record of its process."""
        self._process.send_signal(signal.SIGUSR2)
        self._signal(signal.SIGCONT)
        self._process.wait(60)
        return json.loads((self._folder / "seen.json").read_text())

    def kill(self) -> None:
        """Kill the script and its workers."""
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
    """Start a script, and kill the script at the end of the block."""
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


@pytest.mark.parametrize("name", scaled(list(PACKAGES), ["mnist"]))
def test_script(name: str, benchmark, tmp_path: Path) -> None:
    """Let ``flatout run`` and ``python`` take turns with the same script, after the tuning."""
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
        "times as fast": [round(each, 3) for each in (found.ratio, found.low, found.high)],
        "updates/s": {side: [round(each, 2) for each in measured] for side, measured in rates.items()},
        "updates with tuning": len(tuned),
        "seconds with tuning": {"python": round(by_python, 1), "flatout": round(whole, 1)},
        "tuning seconds": round(flatout["tuning seconds"], 2),
        "first gain": first,
        "kept": flatout["kept"],
    }


def test_mean(benchmark) -> None:
    """Record the geometric mean of all scripts that have run."""
    if not ratios:
        pytest.skip("no script has run")
    mean = benchmark.pedantic(lambda: statistics.geometric_mean(ratios.values()), rounds=1)
    print(f"\n{mean:.2f}x in the geometric mean of {len(ratios)} scripts, {min(ratios.values()):.2f}x at least")
    benchmark.extra_info |= {"geometric mean": round(mean, 3), "scripts": len(ratios)}

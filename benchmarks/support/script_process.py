"""Process that runs a script with ``python`` or ``flatout run``, and records the end of each update.

    python -m support.script_process FOLDER SECONDS python train.py --steps 1000
    python -m support.script_process FOLDER SECONDS flatout run train.py --steps 1000

The process creates the file FOLDER/ready ``SECONDS`` after the first update. Tuning ends at this moment. On SIGUSR2 the
process writes FOLDER/seen.json and ends.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.autotune.engine import Engine
from flatout.autotune.script_report import ScriptReport
from flatout.cli import main
from flatout.cli import run as command
from flatout.tuning.budget import Allowance


class _Over(Allowance):
    """Allowance of a tuning that has ended."""

    def __init__(self, spent: float) -> None:
        super().__init__()
        self.spent = spent

    @property
    def left(self) -> float:
        return -math.inf

    def due(self, seconds: float) -> float:
        return math.inf


class Watch:
    """Recorder of the updates of the first optimizer that steps, and of the first verified gain.

    Args:
        folder: folder of the files.
        seconds: duration of the tuning.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._engines: list[Engine] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._ends: list[float] = []
        self._first_gain: dict[str, float] | None = None
        self._tuned = 0.0
        self._is_ready = False

    def engine(self, *args: Any) -> Engine:
        """Make the engine of ``flatout run``."""
        self._engines.append(Engine(*args))
        return self._engines[-1]

    def end_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record the end of an update."""
        self._optimizer = optimizer if self._optimizer is None else self._optimizer
        if optimizer is not self._optimizer:
            return
        self._ends.append(time.perf_counter())
        if self._first_gain is None and self._has_gained():
            self._first_gain = {"seconds": self._ends[-1] - self._ends[0], "updates": len(self._ends)}
        if not self._is_ready and self._ends[-1] > self._ends[0] + self._seconds:
            self._is_ready = True
            for engine in self._engines:
                if engine.allowance is not None:
                    self._tuned = engine.allowance.spent
                    engine.allowance = _Over(self._tuned)
            (self._folder / "ready").touch()

    def finish(self, *_: object) -> None:
        """Write the record and end the process."""
        modules = ScriptReport.of(self._engines[0]).modules if self._engines else ()
        seen = {
            "ends": self._ends,
            "first gain": self._first_gain,
            "tuning seconds": self._tuned,
            "kept": {each.module: each.report.summary.won for each in modules},
        }
        (self._folder / "seen.json").write_text(json.dumps(seen))
        os._exit(0)

    def _has_gained(self) -> bool:
        outcomes = [tuning.outcome for engine in self._engines for tuning in engine.tunings]
        return any(outcome is not None and outcome.gain is not None and outcome.gain.low > 1 for outcome in outcomes)


def run(folder: Path, seconds: float, launcher: str, arguments: list[str]) -> None:
    """Run a script until SIGUSR2."""
    watch = Watch(folder, seconds)
    signal.signal(signal.SIGUSR2, watch.finish)
    register_optimizer_step_post_hook(watch.end_update)
    if launcher == "flatout":
        with mock.patch.object(command, "Engine", watch.engine):
            sys.exit(main(arguments))
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])

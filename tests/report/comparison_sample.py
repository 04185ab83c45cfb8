"""Invented runs to compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatout.autotune.script_report import ModuleReport, ScriptReport
from flatout.report import Gain, Pace, Report, Row, Summary

JITTER = (0.3, -0.8, 0.1, -0.2, 0.9, -0.5, 0.6, -0.1, 0.2, -0.6, 0.4, -0.3)
"""Deviations of twelve stretches from their mean, relative to the noise."""

PHASES = {"forward": 0.3, "backward": 0.5, "update": 0.15, "other": 0.05}

TRAINING = {
    "model": "Net of 85,002 parameters (c47efa2744ef)",
    "loader": "torch.utils.data.dataloader.DataLoader, length 64, __main__.Data, batch_size=64, num_workers=0",
    "batch": "float32[64, 3, 32, 32], int64[64]",
    "optimizer": "AdamW, 1 groups, foreach=None, fused=None",
    "update": "accumulate=1, clips=False",
    "precision": "float32, autocast off",
    "deterministic": "False",
}
CODE = {"Net": "c9ed44f4ac1e286b", "Data": "00112233aabbccdd"}
ENVIRONMENT = {
    "device": "cpu (AMD EPYC)",
    "cores": "2",
    "threads": "2",
    "torch": "2.13.0",
    "flatout": "0.1.0",
    "python": "3.11.7",
}
FUSED = Row("fused_optimizer", None, "Fused optimizer", "kept", "", "fused", Gain(1.1, 1.05, 1.15))


def pace(load: float = 0.5, step: float = 2.0, *, noise: float = 0.002, samples: float = 64.0, **fields: Any) -> Pace:
    """Return a pace with times in milliseconds, whose stretches deviate by ``noise``."""
    stretches = tuple((load * (1 + noise * each), step * (1 + noise * each)) for each in JITTER)
    rate = 1e3 * samples / (load + step)
    return Pace(step, load, rate, **{"phases": PHASES, "stretches": stretches} | fields)


def summary(after: Pace | None = None, before: Pace | None = None, **fields: Any) -> Summary:
    """Return the contents of a report on a run."""
    made = Summary((FUSED,), ENVIRONMENT, before or pace(1.0, 3.0), after or pace(), training=TRAINING, code=CODE)
    return replace(made, **fields)


def run(*args: Any, **fields: Any) -> Report:
    """Return the report on a run. For the arguments see ``summary``."""
    return Report(summary(*args, **fields))


def script(**modules: Summary) -> ScriptReport:
    """Return the report on a script with these modules. A name may end in a number, to be used twice."""
    reports = [ModuleReport(name.rstrip("0123456789"), Report(each)) for name, each in modules.items()]
    return ScriptReport(reports, updates=100, trained_seconds=10.0, tuning_seconds=1.0)

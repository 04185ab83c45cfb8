"""Benchmarks of ``make gpu-check`` on emulated devices, at their small size: each ends, and its figures fill tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import tool
from tests.emulated_cuda.record import needs_emulated_devices

pytestmark = needs_emulated_devices

check = tool("gpu_check")

PHASES = {phase.name: phase for phase in check.chosen(check.STAGES) if phase.measures and phase.needs != "nvcc"}
"""Programs that nvcc compiles are for a GPU."""

TABLES = {
    "update_path": {"update_path", "host_time"},
    "optimize_gpu": {"optimize_gpu"},
    "optimize_gpu_large": {"optimize_gpu"},
    "kernel_times": {"kernel_times"},
    "data_path_gpu": {"data_path_gpu"},
    "checklist": {"perceptron"},
    "case_study": {"case_study"},
    "normalize_images": {"normalize"},
    "counting_overhead": {"counting"},
}
"""Tables by the phase that measures their figures."""


@dataclass(frozen=True)
class Ran:
    """A phase that ran: its result, what it printed, and the folder of its figures."""

    result: Any
    log: str
    out: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    """Return all phases, which ran two at a time."""
    folder = tmp_path_factory.mktemp("gpu_check")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_PLUGINS", "tests.emulated_cuda.uncompiled")
        for name in ("LOGS", "WORK"):
            patch.setattr(check, name, folder / name.lower())
            (folder / name.lower()).mkdir()

        def run(name: str) -> Ran:
            out = folder / name
            out.mkdir()
            # The limit is for a GPU.
            result = check.run_phase(replace(PHASES[name], limit=3600), check.Machine({}, "", out, full=False))
            return Ran(result, (check.LOGS / f"{name}.log").read_text(), out)

        with ThreadPoolExecutor(2) as pool:
            yield dict(zip(PHASES, pool.map(run, PHASES), strict=True))


@pytest.mark.parametrize("name", PHASES)
def test_a_benchmark_ends(name: str, ran: dict[str, Ran]) -> None:
    assert ran[name].result.status == "passed", ran[name].log
    assert "skipped" not in ran[name].log.splitlines()[-1], ran[name].log


@pytest.mark.parametrize("name", PHASES)
def test_its_figures_fill_tables(name: str, ran: dict[str, Ran]) -> None:
    (file,) = ran[name].out.glob("*.json")
    assert len(json.loads(file.read_text())["benchmarks"]) == 1
    text = check.tables(ran[name].out)
    assert check.NO_TABLE not in text
    assert {line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")} == TABLES[name]

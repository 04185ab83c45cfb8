"""Parts of the GPU benchmarks that need no GPU: the report of Nsight Compute, and the constants of step variants."""

from __future__ import annotations

import importlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flatout.monitor import Sample
from tests.docs.pages import ROOT, tool
from tests.monitor.monitor_sample import h100, t4, whole


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[pytest.MonkeyPatch]:
    """Let imports find the folder of benchmarks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield patch


@pytest.fixture
def kernel_times(benchmarks: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("kernel_times")


@pytest.fixture
def step_variants(benchmarks: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("step_variants")


class SeenGpus:
    """Sampler of a machine with two GPUs, which takes a sample when asked."""

    see: Callable[[Sample], object]

    def __init__(self, see: Callable[[Sample], object], interval: float) -> None:
        SeenGpus.see = see

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def test_figures_of_a_loop_alone_are_those_of_its_gpu(
    benchmarks: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = importlib.import_module("support.turns")
    monkeypatch.setattr(turns, "Sampler", SeenGpus)
    monkeypatch.setattr(turns, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(turns, "time", SimpleNamespace(time=itertools.count().__next__))
    device = torch.cuda.current_device() if turns.DEVICE.type == "cuda" else None

    class Lane:
        def turn(self, seconds: float) -> float:
            for watts in (648.0, 650.0):
                gpu = replace(h100(), cuda_index=device, power_watts=watts)
                SeenGpus.see(replace(whole(), time=0.5, gpus=(gpu, replace(t4(), cuda_index=7))))
            return 100.0

    found = turns.alone(Lane(), 1.0)
    assert found.samples_per_second == 100.0
    assert (found.utilization, found.tensor_active) == (pytest.approx(0.98), pytest.approx(0.478))
    assert (found.power_watts, found.sm_clock_mhz, found.throttle) == (649.0, 1755, ("power limit",))
    assert found.no_gpu is None


def test_the_tensors_of_gpt2_are_all_there(benchmarks: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch) -> None:
    update_path = importlib.import_module("update_path")
    monkeypatch.setattr("support.scale.full", True)
    sizes = update_path.gpt2("cuda")
    assert len(sizes) == 148
    assert sum(sizes) == 124_439_808  # as in transformers


COLUMNS = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
    "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value",
)  # fmt: skip


def report(module: ModuleType, names: list[str]) -> str:
    """Return a report of ``ncu --csv``, whose kernels take 1,000, 2,000, ... microseconds."""
    rows = []
    for i, name in enumerate(names):
        for metric, unit, value in (
            (module.DRAM, "%", "91.5"),
            (module.TIME, "ns", f"{1_000_000 * (i + 1):,}"),
            (module.WARPS, "%", "25"),
        ):
            place = ("1", "7", "(512, 1, 1)", "(7,569, 1, 1)", "0", "9.0", "Command line profiler metrics")
            rows.append((str(i), "12", "python3.12", "127.0.0.1", name, *place, metric, unit, value))
    lines = [",".join(f'"{cell}"' for cell in row) for row in (COLUMNS, *rows)]
    return "\n".join(["==PROF== Connected to process 12", "a line of the program", *lines, ""])


def test_a_report_of_ncu_gives_the_kernels_of_each_update(kernel_times: ModuleType) -> None:
    cases = list(kernel_times.CASES)
    text = report(kernel_times, ["check_kernel", "step_kernel"] * len(cases))
    found = kernel_times.by_case(kernel_times.parsed(text))
    assert list(found) == cases
    check, step = found[cases[1]]
    assert (check.name, step.name) == ("check_kernel", "step_kernel")
    assert check.seconds == pytest.approx(3e-3)
    assert step.of_dram == pytest.approx(0.915)
    assert step.warps == pytest.approx(0.25)
    assert step.launch == "(7,569, 1, 1) x (512, 1, 1)"


@pytest.mark.parametrize("text", ["", "==ERROR== ERR_NVGPUCTRPERM"])
def test_a_report_without_kernels_is_refused(kernel_times: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="got 0"):
        kernel_times.by_case(kernel_times.parsed(text))


def test_figures_of_variants_fill_a_table() -> None:
    figures = tool("figures")
    each = {"ms": 0.5, "GB/s": 100.0, "of_copy": 0.75}
    results = {"test_variants": {"date": "2026-01-01", "a variant": dict.fromkeys(figures.STORAGES, each)}}
    assert list(figures.TABLES["step_variants"].rows(results)) == [("a variant", *["0.500 ms, 75%"] * 4)]


def test_a_variant_has_its_constants(step_variants: ModuleType, tmp_path: Path) -> None:
    folder = step_variants.sources(step_variants.Variant(64, 4096), tmp_path / "csrc")
    assert "kThreadsOf = 64;" in (folder / "optim" / "step_kernel.cuh").read_text()
    assert "kChunk = 4096;" in (folder / "core" / "chunks.h").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_variant_compiles(step_variants: ModuleType, tmp_path: Path) -> None:
    assert step_variants.compiled(step_variants.Variant(512, 8192), tmp_path, "sm_90").exists()


def test_a_constant_that_is_not_found_is_an_error(
    step_variants: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(step_variants.PLACES, "core/chunks.h", "(kNoSuchConstant =)[^;]*;")
    with pytest.raises(ValueError, match="got 0"):
        step_variants.sources(step_variants.Variant(64, 4096), tmp_path / "csrc")

"""Device time of each kernel of an update, to show why an update is slower than a copy.

    pytest benchmarks/kernel_times.py -s --full

An update of 124 million parameters is a check of the gradients and a step. Its time between two events is that of both
kernels. Nsight Compute (``ncu``) measures each kernel, its share of the peak of device memory, and the share of warps
that an SM holds. Without ``ncu``, torch's profiler measures the seconds of each kernel. "of copy" compares the
necessary bytes of a kernel with a copy. The benchmark has not run on a GPU yet.
"""

from __future__ import annotations

import csv
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_clock import device_seconds
from support.kernel_cases import CASES, prepared
from support.scale import scaled
from torch.autograd import DeviceType

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

TIME, DRAM, WARPS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel.

    Attributes:
        name: name of the function.
        seconds: time on the device.
        launch: blocks and threads; empty if unknown.
        of_dram: share of the peak of device memory, from 0 to 1; None if unknown.
        warps: share of the warps that an SM can hold, from 0 to 1; None if unknown.
    """

    name: str
    seconds: float
    launch: str = ""
    of_dram: float | None = None
    warps: float | None = None


def parsed(report: str) -> list[Kernel]:
    """Return the kernels of a report of ``ncu --csv --print-units base``, in the order of their launch."""
    lines = report.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines[first:]):
        kernel = rows.setdefault(row["ID"], row)
        kernel[row["Metric Name"]] = row["Metric Value"].replace(",", "")
    return [
        Kernel(
            row["Kernel Name"],
            float(row[TIME]) / 1e9,
            f"{row['Grid Size']} x {row['Block Size']}",
            float(row[DRAM]) / 100,
            float(row[WARPS]) / 100,
        )
        for row in rows.values()
    ]


def by_case(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Return the kernels of each case. An update begins with its check.

    Raises:
        ValueError: the number of updates is not that of the cases.
    """
    updates: list[list[Kernel]] = []
    for kernel in kernels:
        if "check_kernel" in kernel.name:
            updates.append([])
        if updates:
            updates[-1].append(kernel)
    if len(updates) != len(CASES):
        raise ValueError(f"the report must have {len(CASES)} updates, got {len(updates)}")
    return dict(zip(CASES, updates, strict=True))


def by_ncu() -> dict[str, list[Kernel]]:
    """Measure the kernels with ``ncu`` in another process.

    Raises:
        ValueError: ``ncu`` is not installed, or cannot read the counters of this device.
    """
    if shutil.which("ncu") is None:
        raise ValueError("ncu is not installed")
    # ncu would lock the clocks, which are those of other users of the machine, too.
    options = ["--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    done = subprocess.run(
        ["ncu", *options, "--metrics", f"{TIME},{DRAM},{WARPS}", sys.executable, "-m", "support.kernel_cases"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        return by_case(parsed(done.stdout))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{error}. The end of what ncu printed:\n{done.stdout[-1000:]}") from error


def profiled(run: Callable[[], object]) -> list[Kernel]:
    """Return the kernels of a call that torch's profiler has seen."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        run()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.elapsed_us() / 1e6)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and "_kernel" in event.name
    ]


def test_kernels(benchmark: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure updates by events, and then their kernels."""
    source = torch.rand(scaled(1 << 28, 1 << 16), device="cuda")
    target = torch.empty_like(source)
    copies = [device_seconds(partial(target.copy_, source))[0] for _ in range(scaled(10, 2))]
    copy = 2 * source.nbytes / statistics.median(copies)
    figures: dict[str, Any] = {"copy_GB/s": copy / 1e9}
    seen: dict[str, list[Kernel]] = {}
    print(f"\n\nclipped updates of one tensor on {torch.cuda.get_device_name()}; copy {copy / 1e9:,.0f} GB/s")
    for name, problem, x in prepared():
        assert x.bytes_per_param is not None
        taken = statistics.median(device_seconds(x.update)[0] for _ in range(scaled(10, 2)))
        share = x.bytes_per_param * problem.total / taken / copy
        print(f"  {name:26}{1e3 * taken:8.3f} ms  {x.bytes_per_param:3g} B/param  {share:4.0%} of copy", flush=True)
        figures[name] = {"ms": 1e3 * taken, "bytes_per_param": x.bytes_per_param, "of_copy": share}
        keep(figures)
        seen[name] = profiled(x.update)
    try:
        seen, how = by_ncu(), "ncu"
    except ValueError as reason:
        how = "torch's profiler"
        print(f"  {reason}")
    print(f"  kernels, by {how}:")
    for name, kernels in seen.items():
        for kernel in kernels:
            numbers = f"{1e3 * kernel.seconds:8.3f} ms"
            if kernel.of_dram is not None and kernel.warps is not None:
                numbers += f"  memory {kernel.of_dram:4.0%}, warps {kernel.warps:4.0%}, {kernel.launch}"
            print(f"  {name:26}{numbers}  {kernel.name[:60]}")
        figures[name] |= {"kernels": [asdict(kernel) for kernel in kernels], "kernels by": how}
    keep(figures)
    benchmark.pedantic(torch.cuda.synchronize, rounds=1)

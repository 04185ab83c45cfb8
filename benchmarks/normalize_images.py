"""Comparison of flatout.data.Normalize with torch's separate operations, from uint8 images to channels_last floats.

    pytest benchmarks/normalize_images.py -s --full

Both and a plain copy take turns in one process, on the same batch. The separate operations are
``.float().div_(255).sub_(mean).div_(std).to(dtype).contiguous(memory_format=torch.channels_last)``, with mean and std
on the device. The prefetchers of timm and NVIDIA do this in the same number of kernels.

A ratio compares times of one round. The table shows medians and quartiles over rounds. GB/s are the necessary bytes,
with 1 read and 2 or 4 written per element, divided by the median time. "of copy" compares this bandwidth with the copy
of the same round. A CPU reads cache lines before it writes them. These reads count, also for the copy. The test asserts
only that the results agree. Each figure is printed with its goal, and with "met" or "missed".

The goals are for GPUs whose memory is in ``PEAKS``, and they are not results. Conversion to bfloat16 in channels_last
is at least 4 times as fast as the separate operations, and reaches 0.8 of the memory's peak. The cases on CUDA have not
run yet.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.goals import Goal
from support.scale import scaled
from torch import Tensor

from flatout.data import Normalize

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")),
]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PEAKS = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12}  # bytes per second of memory, from the data sheets
RATIO_GOAL, PEAK_GOAL = 4.0, 0.8


@dataclass(frozen=True)
class Case:
    title: str
    side: int
    given_format: torch.memory_format
    dtype: torch.dtype
    has_goals: bool = False

    def images(self, device: str) -> Tensor:
        """Return about 38 M elements on a CPU and 600 M on a GPU, which exceed any cache."""
        elements = scaled(600_000_000, 100_000) if device == "cuda" else scaled(38_000_000, 380_000)
        count = max(1, elements // (3 * self.side**2))
        x = torch.empty(count, 3, self.side, self.side, dtype=torch.uint8, device=device).random_(0, 256)
        return x.contiguous(memory_format=self.given_format)


PLANAR, INTERLEAVED = torch.contiguous_format, torch.channels_last
CASES = {
    "nchw_224_bf16": Case("224 x 224, contiguous to bfloat16", 224, PLANAR, torch.bfloat16, True),
    "nhwc_224_bf16": Case("224 x 224, channels_last to bfloat16", 224, INTERLEAVED, torch.bfloat16, True),
    "nchw_224_f32": Case("224 x 224, contiguous to float32", 224, PLANAR, torch.float32),
    "nhwc_224_f32": Case("224 x 224, channels_last to float32", 224, INTERLEAVED, torch.float32),
    "nchw_227_bf16": Case("227 x 227 (odd), contiguous to bfloat16", 227, PLANAR, torch.bfloat16),
    "nchw_32_bf16": Case("32 x 32, contiguous to bfloat16", 32, PLANAR, torch.bfloat16),
}


def separate(x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that runs torch's operations one after the other."""
    mean, std = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in (MEAN, STD))

    def run() -> Tensor:
        values = x.float().div_(255).sub_(mean).div_(std).to(dtype)
        return values.contiguous(memory_format=torch.channels_last)

    return run


def seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, until the device is done."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def ratios(over: list[float], under: list[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles of the ratios of the rounds."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return middle, low, high


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_normalize(name: str, device: str, benchmark: pytest.FixtureRequest) -> None:
    case = CASES[name]
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before"
    x = case.images(device)
    transform = Normalize(MEAN, STD, dtype=case.dtype)
    by_torch = separate(x, case.dtype)
    # On a GPU torch multiplies by 1 / 255, which may differ in the last bit.
    tolerance = 2.0**-7 if case.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(transform(x), by_torch(), rtol=tolerance, atol=tolerance)
    moved = x.numel() * (1 + case.dtype.itemsize * (2 if device == "cpu" else 1))
    source = torch.empty(moved // (3 if device == "cpu" else 2), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    contenders: dict[str, Callable[[], object]] = {
        "torch, separate operations": by_torch,
        "flatout": lambda: transform(x),
        "copy": lambda: target.copy_(source),
    }
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for i in range(scaled(20, 5)):
        keys = list(contenders)
        for key in keys[i % 3 :] + keys[: i % 3]:
            times[key].append(seconds(contenders[key], device))

    reference, ours, copy = times["torch, separate operations"], times["flatout"], times["copy"]
    gain, of_copy = ratios(reference, ours), ratios(copy, ours)
    rate = moved / statistics.median(ours)
    where = f"CPU, {torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
    peak = next((peak for gpu, peak in PEAKS.items() if device == "cuda" and gpu in where), None)
    goals = {"ratio": RATIO_GOAL, "of_peak": PEAK_GOAL} if case.has_goals and peak is not None else {}
    print(f"\n\n{case.title}: {len(x):,} images, {x.numel() / 1e6:,.1f} M elements on {where}; {load}")
    for key, mine in times.items():
        print(f"  {key:28}{statistics.median(mine) * 1e3:9.3f} ms, least {min(mine) * 1e3:9.3f} ms", end="")
        print("" if key == "torch, separate operations" else f"  {moved / statistics.median(mine) / 1e9:8.1f} GB/s")
    print(f"  torch / flatout {gain[0]:.2f}x ({gain[1]:.2f} to {gain[2]:.2f}); flatout {of_copy[0]:.0%} of copy")
    if goals and peak is not None:
        print(f"  {Goal('times torch', gain[0], RATIO_GOAL)}")
        print(f"  {Goal('share of the peak of memory', rate / peak, PEAK_GOAL, percent=True)}")
    benchmark.extra_info.update(  # type: ignore[attr-defined]
        {
            "images": len(x),
            "elements": x.numel(),
            "ms_median": {key: statistics.median(mine) * 1e3 for key, mine in times.items()},
            "ratio_median": gain[0],
            "ratio_quartiles": gain[1:],
            "GB/s": rate / 1e9,
            "copy_GB/s": moved / statistics.median(copy) / 1e9,
            "of_copy": of_copy[0],
            "of_peak": None if peak is None else rate / peak,
            "goals": goals,
            "load": load,
        }
    )
    benchmark.pedantic(contenders["flatout"], rounds=3)  # type: ignore[attr-defined]

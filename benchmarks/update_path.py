"""Unscale + check + clip + AdamW: torch at its best flags against flatout's lazy update.

Run ``pytest benchmarks/update_path.py -s`` (the file names no test of the suite, so it must be named). Both
sides are timed alternately in one process, so that a busy machine slows both; beside them stands the copy
bandwidth of the same run, and the ratio is the median of the ratios of neighbouring rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

import flatout.optim as fo
from flatout.optim import update

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")),
]
CASES = {
    "32M_in_100": [320_000] * 100,
    "2000_small": [512] * 2000,
}
BYTES = {"torch": 48, "flatout": 32}  # DRAM traffic per fp32 parameter, counted from the algorithm


def make(module: object, sizes: list[int], device: str, **options: object) -> tuple[torch.optim.Optimizer, list]:
    params = [torch.nn.Parameter(torch.rand(n, device=device)) for n in sizes]
    for p in params:
        p.grad = torch.rand_like(p) - 0.5
    return module.AdamW(params, lr=1e-4, **options), params  # type: ignore[attr-defined]


def torch_update(optimizer: torch.optim.Optimizer, params: list, scale: torch.Tensor) -> Callable[[], None]:
    """What GradScaler, clip_grad_norm_ and the fused optimizer do between backward and zero_grad."""
    grads = [p.grad for p in params]
    found_inf, inv_scale = torch.zeros_like(scale), scale.reciprocal()

    def run() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()

    return run


def flatout_update(optimizer: torch.optim.Optimizer, scale: torch.Tensor) -> Callable[[], None]:
    inv_scale = scale.reciprocal()
    return lambda: update(optimizer, inv_scale=inv_scale, max_grad_norm=1.0) and None


def seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_update(case: str, device: str, benchmark: pytest.FixtureRequest) -> None:
    sizes = CASES[case]
    scale = torch.ones((), device=device)
    optimizer, params = make(torch.optim, sizes, device, fused=True)
    runs = {"torch": torch_update(optimizer, params, scale)}
    optimizer, _ = make(fo, sizes, device)
    runs["flatout"] = flatout_update(optimizer, scale)
    total = sum(sizes)
    source = torch.rand(max(total, 1 << 22), device=device)
    target = torch.empty_like(source)
    runs["copy"] = lambda: target.copy_(source)
    for run in runs.values():
        run(), run()
    rounds = 15 if total > 10_000_000 else 50
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, device))
    ratios = [a / b for a, b in zip(times["torch"], times["flatout"], strict=True)]
    best = {name: min(values) for name, values in times.items()}
    # A CPU reads the lines of the target before it overwrites them; an update's targets are read anyway.
    copy = (3 if device == "cpu" else 2) * source.nbytes / best["copy"]
    quartiles = statistics.quantiles(ratios, n=4)
    info = {
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": quartiles[::2],
        "copy_GB/s": copy / 1e9,
    }
    print(f"\n{case} on {device} ({torch.get_num_threads()} threads), copy {copy / 1e9:.1f} GB/s")
    for name, bytes_per_param in BYTES.items():
        bandwidth = total * bytes_per_param / best[name]
        info[f"{name}_ms_min"] = best[name] * 1e3
        info[f"{name}_ms_median"] = statistics.median(times[name]) * 1e3
        info[f"{name}_GB/s"] = bandwidth / 1e9
        print(
            f"  {name:8s} {best[name] * 1e3:8.2f} ms min {info[f'{name}_ms_median']:8.2f} ms median   "
            f"{bytes_per_param} B/param   {bandwidth / 1e9:6.1f} GB/s   {bandwidth / copy:5.0%} of copy"
        )
    print(
        f"  ratio    {info['ratio_median']:.2f}x (quartiles {quartiles[0]:.2f}-{quartiles[2]:.2f}), "
        f"of minima {best['torch'] / best['flatout']:.2f}x"
    )
    benchmark.extra_info.update(info)  # type: ignore[attr-defined]
    benchmark.pedantic(runs["flatout"], rounds=3)  # type: ignore[attr-defined]

"""Peak FLOP/s of a device, by its data sheet, at its current clock, and by measurement."""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from flatout.core.cache_folder import cache_folder, read_own, write_own

Precision = torch.dtype | Literal["tf32"]
"""Precision of products, which is a dtype, or ``"tf32"`` for float32 operands on tensor cores."""

Products = Literal["matmul", "conv", "rnn"]
"""Kinds of products with a TF32 setting of their own in torch."""

TF32_CAPABILITY = (8, 0)
"""Compute capability from which tensor cores multiply in TF32 (Ampere)."""

_TENSOR_CORES = "tf32", torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU, which is a row of the table ``GPUS``.

    Attributes:
        name: common name.
        pattern: regular expression for the driver's whole name, without ``NVIDIA`` or ``Tesla`` at the start.
        sms: streaming multiprocessors of the whole device.
        teraflops: dense peak in TFLOP/s by precision, with 16-bit products summed in float32. The second figure of some
            data sheets, which counts zeros of 2:4 sparsity, is not used.
        per_cycle: FLOPs of one SM in one cycle, in bfloat16 (float16 on a GPU without bfloat16) and in float32.
        source: document that prints the figures.
    """

    name: str
    pattern: str
    sms: int
    teraflops: Mapping[Precision, float]
    per_cycle: tuple[int, int]
    source: str


def _peaks(
    fp32: float,
    fp16: float,
    *,
    bf16: bool = True,
    tf32: float | None = None,
    fp8: float | None = None,
    int8: float | None = None,
    fp64: float | None = None,
) -> dict[Precision, float]:
    known: dict[Precision, float | None] = {
        torch.float32: fp32,
        torch.float16: fp16,
        torch.bfloat16: fp16 if bf16 else None,
        "tf32": tf32,
        torch.float8_e4m3fn: fp8,
        torch.float8_e5m2: fp8,
        torch.int8: int8,
        torch.float64: fp64,
    }
    return {precision: peak for precision, peak in known.items() if peak is not None}


_HOPPER_SXM = _peaks(66.9, 989.4, tf32=494.7, fp8=1978.9, int8=1978.9, fp64=66.9)

GPUS: tuple[Gpu, ...] = (
    Gpu("V100 SXM", r"V100-SXM[23]-(16|32)GB", 80, _peaks(15.7, 125, bf16=False, fp64=7.8), (1024, 128),
        "NVIDIA Tesla V100 data sheet (2018)"),
    Gpu("V100 PCIe", r"V100-PCIE-(16|32)GB", 80, _peaks(14, 112, bf16=False, fp64=7), (1024, 128),
        "NVIDIA Tesla V100 data sheet (2018)"),
    Gpu("V100S PCIe", r"V100S-PCIE-32GB", 80, _peaks(16.4, 130, bf16=False, fp64=8.2), (1024, 128),
        "NVIDIA V100 data sheet (2020)"),
    Gpu("T4", r"T4", 40, _peaks(8.1, 65, bf16=False, int8=130), (1024, 128), "NVIDIA T4 data sheet (2019)"),
    Gpu("A100", r"A100-(SXM4-(40|80)GB|PCIE-40GB)|A100 80GB PCIe|A100-SXM-(40|80)GB", 108,
        _peaks(19.5, 312, tf32=156, int8=624, fp64=19.5), (2048, 128), "NVIDIA A100 data sheet (2021)"),
    Gpu("A10", r"A10", 72, _peaks(31.2, 125, tf32=62.5, int8=250), (1024, 256), "NVIDIA A10 data sheet (2021)"),
    Gpu("A10G", r"A10G", 80, _peaks(35, 70, tf32=35, int8=140), (512, 256),
        "NVIDIA A10G data sheet for Amazon EC2 G5 (2021)"),
    Gpu("L4", r"L4", 58, _peaks(30.3, 121, tf32=60, fp8=242.5, int8=242.5), (1024, 256),
        "NVIDIA L4 data sheet (2023), halved where it counts sparsity"),
    Gpu("L40", r"L40", 142, _peaks(90.5, 181.05, tf32=90.5, fp8=362, int8=362), (512, 256),
        "NVIDIA L40 data sheet (2023)"),
    Gpu("L40S", r"L40S", 142, _peaks(91.6, 362.05, tf32=183, fp8=733, int8=733), (1024, 256),
        "NVIDIA L40S data sheet (2023)"),
    Gpu("RTX 3090", r"GeForce RTX 3090", 82, _peaks(35.6, 71.2, tf32=35.6, int8=284.7), (512, 256),
        "NVIDIA GA102 white paper (2021), appendix A"),
    Gpu("RTX 4090", r"GeForce RTX 4090", 128, _peaks(82.6, 165.2, tf32=82.6, fp8=330.3, int8=660.6), (512, 256),
        "NVIDIA Ada white paper (2022), appendix A"),
    Gpu("RTX 5090", r"GeForce RTX 5090", 170, _peaks(104.8, 209.5, tf32=104.8, fp8=419, int8=838), (512, 256),
        "NVIDIA RTX Blackwell white paper (2025), appendix A"),
    Gpu("H100 SXM", r"H100 80GB HBM3|H100 SXM5 80GB", 132, _HOPPER_SXM, (4096, 256),
        "NVIDIA Hopper white paper (2022), table 2; data sheet (2024)"),
    Gpu("H100 PCIe", r"H100 PCIe", 114, _peaks(51.2, 756, tf32=378, fp8=1513, int8=1513, fp64=51.2), (4096, 256),
        "NVIDIA Hopper white paper (2022), table 2"),
    Gpu("H100 NVL", r"H100 NVL", 132, _peaks(60, 835.5, tf32=417.5, fp8=1670.5, int8=1670.5, fp64=60), (4096, 256),
        "NVIDIA H100 data sheet (2024), halved where it counts sparsity"),
    Gpu("H200 SXM", r"H200", 132, _HOPPER_SXM, (4096, 256), "NVIDIA H200 data sheet (2024), halved for sparsity"),
    Gpu("GH200", r"GH200 (96GB HBM3|120GB|144G HBM3e|480GB)", 132, _HOPPER_SXM, (4096, 256),
        "NVIDIA GH200 data sheet (2024), halved for sparsity"),
    Gpu("H200 NVL", r"H200 NVL", 132, _peaks(60, 835.5, tf32=417.5, fp8=1670.5, int8=1670.5, fp64=60), (4096, 256),
        "NVIDIA H200 data sheet (2024), halved where it counts sparsity"),
    Gpu("B200", r"B200", 148, _peaks(75, 2250, tf32=1125, fp8=4500, int8=4500, fp64=37), (8192, 256),
        "NVIDIA HGX B200 data sheet (2025), an eighth of it"),
    Gpu("GB200", r"GB200", 152, _peaks(80, 2500, tf32=1250, fp8=5000, int8=5000, fp64=40), (8192, 256),
        "NVIDIA GB200 NVL72 data sheet (2025), per GPU"),
)  # fmt: skip
"""Table of peaks."""

_warned: set[tuple[str, Precision]] = set()


def gpu_of(name: str) -> Gpu | None:
    """Return the row of a GPU by its name in ``nvidia-smi`` and torch, or None if the table has no such row.

    GPUs with similar names do not share a row. For example, the RTX 4090 of a laptop has no row.
    """
    bare = re.sub(r"^(NVIDIA |Tesla )+", "", name.strip())
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, bare)), None)


def peak_flops(device: torch.device | str | int | None = None, dtype: Precision = torch.float32) -> float | None:
    """Return the dense peak FLOP/s of a GPU by its data sheet, with 16-bit products summed in float32.

    Args:
        device: a CUDA device, or the name of a GPU as ``nvidia-smi`` prints it. The default is the current device.
        dtype: precision of the products. float32 means CUDA cores. Use ``"tf32"`` if TF32 is allowed.

    Returns:
        Peak in FLOP/s. A MIG slice gets its share of SMs. None if the table has no figure for the device, for example
            for a CPU. :func:`measured_peak_flops` measures a CPU.

    Warns:
        RuntimeWarning: once per device and precision without a figure.
    """
    gpu, sms = _looked_up(device, dtype)
    return None if gpu is None else gpu.teraflops[dtype] * 1e12 * sms / gpu.sms


def clock_peak_flops(
    device: torch.device | str | int | None = None, dtype: Precision = torch.float32, *, clock_mhz: float | None = None
) -> float | None:
    """Return the peak FLOP/s of a GPU at its clock. Power and heat may hold the clock below the data sheet's.

    The peak is SMs x FLOPs of an SM per cycle x clock.

    Args:
        device: as for :func:`peak_flops`.
        dtype: as for :func:`peak_flops`.
        clock_mhz: clock of the SMs in MHz. The default is the current clock, which requires ``nvidia-ml-py``. An idle
            device has a low clock.

    Returns:
        Peak in FLOP/s, or None if the table has no figure for the device.

    Warns:
        RuntimeWarning: once per device and precision without a figure.
    """
    gpu, sms = _looked_up(device, dtype)
    if gpu is None:
        return None
    # Data sheets rate tensor cores and CUDA cores at different clocks. So each figure is compared within its kind.
    per_cycle, rated = (
        (gpu.per_cycle[0], torch.float16) if dtype in _TENSOR_CORES else (gpu.per_cycle[1], torch.float32)
    )
    clock = torch.cuda.clock_rate(_place(device)) if clock_mhz is None else clock_mhz
    return sms * per_cycle * gpu.teraflops[dtype] / gpu.teraflops[rated] * clock * 1e6


def measured_peak_flops(
    device: torch.device | str | int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    measure: bool = True,
    refresh: bool = False,
    seconds: float = math.inf,
) -> float | None:
    """Return the highest measured FLOP/s of a product of square matrices on this machine.

    The measurement takes one or two seconds per device, dtype, number of threads and release of torch. Later calls read
    the result from ``peaks.json`` in the folder of ``flatout.core.cache_folder``, or from memory. The measurement of
    float32 uses the user's TF32 setting.

    Args:
        device: device to measure. The default is the current CUDA device if there is one, else the CPU.
        dtype: dtype of the matrices.
        measure: True to measure if no result is stored.
        refresh: True to measure even if a result is stored.
        seconds: limit of the measurement. A measurement that would take longer is given up.

    Returns:
        Peak in FLOP/s. None if it is neither stored nor measured, or if torch cannot multiply such matrices there.
    """
    place = _place(device)
    if place.type not in _SIZES:
        return None
    tf32 = dtype == torch.float32 and multiplies_in_tf32(place)
    here = f"cpu of {platform.node()}, {torch.get_num_threads()} threads"  # a home may be shared by machines
    what = torch.cuda.get_device_name(place) if place.type == "cuda" else here
    key = " | ".join([what, "tf32" if tf32 else str(dtype).removeprefix("torch."), f"torch {torch.__version__}"])
    known = _measured | _read_cache()
    if refresh or (measure and key not in known):
        measured = _sweep(place, dtype, seconds)
        if measured is None:
            return None
        _measured[key] = measured
        known = _measured | _read_cache() | {key: measured}
        _write_cache(known)
    return known.get(key)


def multiplies_in_tf32(place: torch.device, products: Products = "matmul") -> bool:
    """Return True if tensor cores of the device multiply float32 numbers under the user's settings.

    By default, torch allows this for cuDNN's convolutions and recurrent layers, and not for matrix products.

    Args:
        place: the device.
        products: kind of the products.
    """
    if place.type != "cuda" or torch.cuda.get_device_capability(place) < TF32_CAPABILITY:
        return False
    settings: Any = torch.backends
    holder = settings.cuda.matmul if products == "matmul" else getattr(settings.cudnn, products)
    return holder.fp32_precision == "tf32"


_SWEEP_SECONDS = 0.2
"""Seconds of measurement for each size of matrix."""
_SIZES = {"cuda": (2048, 4096, 8192), "cpu": (512, 1024, 2048)}


_SLOW_SECONDS = 2.0
"""Longest measurement of one size. Without hardware for 16-bit products, larger sizes would take minutes.

Two cores of an AMD EPYC take 0.9 s for a size of 2048 in float32, and 8.7 s for a size of 1024 in float16.
"""

_FEWEST = 3
"""Timed products of a size. One more product precedes them."""


_measured: dict[str, float] = {}
"""Results of this process, for processes without a cache folder."""


def _sweep(place: torch.device, dtype: torch.dtype, seconds: float) -> float | None:
    """Return the highest FLOP/s over all sizes, each from the median time.

    None means that torch cannot multiply such matrices, or that the measurement would take more than ``seconds``.
    """
    best, end, sizes = 0.0, time.perf_counter() + seconds, _SIZES[place.type]
    try:
        for i, size in enumerate(sizes):
            expected = (_FEWEST + 1) * 2 * size**3 / best if best else 0.0
            if expected > _SLOW_SECONDS:
                break
            if time.perf_counter() + max(expected, _SWEEP_SECONDS * (len(sizes) - i)) > end:
                return None
            best = max(best, _rate(place, dtype, size))
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return best


def _rate(place: torch.device, dtype: torch.dtype, size: int) -> float:
    generator = torch.Generator(place).manual_seed(0)  # the training uses the global generator
    a, b = (torch.randn(size, size, device=place, generator=generator).to(dtype) for _ in range(2))
    out = torch.matmul(a, b)
    taken: list[float] = []
    end = time.perf_counter() + _SWEEP_SECONDS
    while len(taken) < _FEWEST or time.perf_counter() < end:
        taken.append(_seconds(place, a, b, out))
    return 2 * size**3 / statistics.median(taken)


def _seconds(place: torch.device, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    if place.type != "cuda":
        begin = time.perf_counter()
        torch.matmul(a, b, out=out)
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(place)
    first.record(stream)
    torch.matmul(a, b, out=out)
    last.record(stream)
    last.synchronize()
    return first.elapsed_time(last) * 1e-3


def _cache() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "peaks.json"


def _read_cache() -> dict[str, float]:
    path = _cache()
    text = None if path is None else read_own(path)
    try:
        read = json.loads(text or "{}")
        return {str(key): float(value) for key, value in read.items() if 0 < float(value) < math.inf}
    except (ValueError, OverflowError, AttributeError, TypeError, RecursionError):
        return {}  # the file was not written by flatout, and the next measurement replaces it


def _write_cache(known: Mapping[str, float]) -> None:
    path = _cache()
    if path is not None:
        write_own(path, json.dumps(known, indent=1))


def _place(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _looked_up(device: torch.device | str | int | None, dtype: Precision) -> tuple[Gpu | None, int]:
    """Return a GPU's row and the SMs of the device or MIG slice. If the peak is unknown, warn and return no row."""
    name, sms = _named(device)
    gpu = gpu_of(name)
    if gpu is not None and dtype in gpu.teraflops:
        return gpu, sms or gpu.sms
    if (name, dtype) not in _warned:
        _warned.add((name, dtype))
        warnings.warn(
            f"the peak of {name} in {dtype} is not known to flatout, so there is no MFU against it: give peak_flops "
            "yourself, or use flatout.mfu.measured_peak_flops()",
            RuntimeWarning,
            stacklevel=3,
        )
    return None, 0


def _named(device: torch.device | str | int | None) -> tuple[str, int]:
    """Return the device's name and the number of SMs of a MIG slice, or 0 for a whole device."""
    if isinstance(device, str) and not re.fullmatch(r"(cuda|cpu|meta|mps|xpu)(:\d+)?", device):
        return device, 0
    place = _place(device)
    if place.type != "cuda":
        return f"the {place.type.upper()}", 0
    properties = torch.cuda.get_device_properties(place)
    whole, is_slice, _ = properties.name.partition(" MIG ")
    return whole, properties.multi_processor_count if is_slice else 0

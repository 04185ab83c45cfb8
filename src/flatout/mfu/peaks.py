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

_FP8, _FP8_WIDE, _FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2

_TENSOR_CORES = "tf32", torch.float16, torch.bfloat16, _FP8, _FP8_WIDE, _FP4


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU, which is a row of the table ``GPUS``.

    Attributes:
        name: common name.
        pattern: regular expression for the driver's whole name, without ``NVIDIA`` or ``Tesla`` at the start.
        sms: streaming multiprocessors of the whole device.
        teraflops: dense peak in TFLOP/s by precision, with products of 8 and 16 bits summed in float32. The second
            figure of some data sheets, which counts zeros of 2:4 sparsity, is halved.
        per_cycle: FLOPs of one SM in one cycle, in bfloat16 (float16 on a GPU without bfloat16) and in float32. None
            if unknown.
        source: document by NVIDIA that prints the figures. A data sheet of a system is divided by its GPUs.
    """

    name: str
    pattern: str
    sms: int
    teraflops: Mapping[Precision, float]
    per_cycle: tuple[int, int] | None
    source: str


def _gpu(line: str) -> Gpu:
    """Return the row of a line of ``_SHEETS``."""
    name, (sms, *figures, cycle, rest) = line[:13].rstrip(), line[13:].split(None, 8)
    known = dict(zip(_COLUMNS, figures, strict=True))
    known |= {torch.bfloat16: "-" if name.startswith(("V100", "T4")) else known[torch.float16], _FP8_WIDE: known[_FP8]}
    peaks = {precision: float(figure) for precision, figure in known.items() if figure != "-"}
    tensor, _, cuda = cycle.partition("/")
    source, _, pattern = rest.partition("  ")
    per_cycle = (int(tensor), int(cuda)) if cuda else None
    return Gpu(name, pattern or f"(GeForce )?{name}", int(sms), peaks, per_cycle, source)


_COLUMNS: tuple[Precision, ...] = torch.float64, torch.float32, "tf32", torch.float16, _FP8, _FP4

# Name, SMs, fp64, fp32, tf32, fp16 (and bf16 since Ampere), fp8, fp4, FLOPs per cycle, source, driver's name.
_SHEETS = r"""
V100 SXM        80  7.8  15.7     -    125      -      -  1024/128  data sheet 2018  V100-SXM[23]-(16|32)GB
V100 PCIe       80    7    14     -    112      -      -  1024/128  data sheet 2018  V100-PCIE-(16|32)GB
V100S PCIe      80  8.2  16.4     -    130      -      -  1024/128  data sheet 2020  V100S-PCIE-32GB
T4              40    -   8.1     -     65      -      -  1024/128  data sheet 2019
A100           108 19.5  19.5   156    312      -      -  2048/128  data sheet 2021  A100.(SXM4?-|PCIE-)?[48]0GB( PCIe)?
A800           108 19.5  19.5   156    312      -      -  2048/128  data sheet 2022  A800.(SXM4-)?[48]0GB( PCIe)?
A30             56 10.3  10.3    82    165      -      -  2048/128  data sheet 2021
A40             84    -  37.4  74.8  149.7      -      -  1024/256  data sheet 2021
A10             72    -  31.2  62.5    125      -      -  1024/256  data sheet 2021
A10G            80    -    35    35     70      -      -   512/256  data sheet 2021
RTX A6000       84    -  38.7  77.4  154.8      -      -  1024/256  GA102 paper 2021
RTX 3090        82    -  35.6  35.6   71.2      -      -   512/256  GA102 paper 2021
L4              58    -  30.3    60    121  242.5      -  1024/256  data sheet 2023
L20             92    -  59.8  59.8  119.5    239      -   512/256  data sheet 2023
L40            142    -  90.5  90.5 181.05    362      -   512/256  data sheet 2023
L40S           142    -  91.6   183 362.05    733      -  1024/256  data sheet 2023
RTX 6000 Ada   142    -  91.1 182.1  364.2  728.5      -  1024/256  Ada paper 2023  RTX 6000 Ada Generation
RTX 4080        76    -  48.7  48.7   97.5  194.9      -   512/256  Ada paper 2022
RTX 4090       128    -  82.6  82.6  165.2  330.3      -   512/256  Ada paper 2022
H20             78    1    44    74    148    296      -         -  data sheet 2023  H20(-3e)?
H100 SXM       132 66.9  66.9 494.7  989.4 1978.9      -  4096/256  Hopper paper 2022  H100 (80GB HBM3|SXM5 80GB)
H100 PCIe      114 51.2  51.2   378    756   1513      -  4096/256  Hopper paper 2022
H100 NVL       132   60    60 417.5  835.5 1670.5      -  4096/256  data sheet 2024
H800 SXM       132    1  66.9 494.7  989.4 1978.9      -  4096/256  data sheet 2023  H800
H800 PCIe      114  0.8  51.2   378    756   1513      -  4096/256  data sheet 2023
H200 SXM       132 66.9  66.9 494.7  989.4 1978.9      -  4096/256  data sheet 2024  H200
H200 NVL       132   60    60 417.5  835.5 1670.5      -  4096/256  data sheet 2024
GH200          132 66.9  66.9 494.7  989.4 1978.9      -  4096/256  data sheet 2024  GH200 \d+GB?( HBM3e?)?
B200           148   37    75  1125   2250   4500   9000  8192/256  HGX data sheet 2025
GB200          152   40    80  1250   2500   5000  10000  8192/256  data sheet 2025
B300           148 1.25    75  1125   2250   4500  13125  8192/256  HGX data sheet 2025  B300 SXM6 AC
GB300          152    -    80  1250   2500   5000  15000  8192/256  data sheet 2025
GB10            48    -    31     -      -      -    500         -  Hot Chips 2025
RTX 5080        84    -  56.3  56.3  112.6  225.1  900.4   512/256  RTX Blackwell paper 2025
RTX 5090       170    - 104.8 104.8  209.5    419   1676   512/256  RTX Blackwell paper 2025
RTX PRO 6000   188    -   126 251.9  503.8 1007.6 2015.2  1024/256  RTX PRO paper 2025  RTX PRO 6000 Blackwell W.*
RTX PRO 6000S  188    -     -     -  467.8  935.6 1871.2  1024/256  aiconfigurator 2026  RTX PRO 6000 Blackwell S.*
"""

GPUS = tuple(map(_gpu, _SHEETS.strip().splitlines()))
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
    if gpu is None or gpu.per_cycle is None:
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

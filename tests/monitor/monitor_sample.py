"""Invented samples of the monitor."""

from __future__ import annotations

from flatout.monitor import GpuSample, Sample

GIB = 2**30


def h100() -> GpuSample:
    return GpuSample(
        index=0,
        cuda_index=0,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-8932f937",
        util_percent=98.0,
        memory_used_bytes=57 * GIB,
        memory_total_bytes=80 * GIB,
        power_watts=648.3,
        power_limit_watts=700.0,
        sm_clock_mhz=1755,
        sm_clock_max_mhz=1980,
        temperature_celsius=63,
        throttle=("power limit",),
        sm_active_percent=93.1,
        tensor_active_percent=47.8,
        dram_active_percent=52.9,
        gpm="NVML GPM",
    )


def t4() -> GpuSample:
    return GpuSample(
        index=1,
        cuda_index=None,
        name="Tesla T4",
        util_percent=0.0,
        memory_used_bytes=GIB,
        memory_total_bytes=15 * GIB,
        power_watts=31.0,
        sm_clock_mhz=585,
        sm_clock_max_mhz=1590,
        throttle=("idle", "heat (driver)"),
        gpm="needs a later GPU",
        missing={"power_limit_watts": "not supported", "temperature_celsius": "unknown", "cuda_index": "unlike GPUs"},
    )


def whole() -> Sample:
    return Sample(1.7e9, (h100(), t4()), None)


def lost() -> Sample:
    """Return a sample of a GPU that cannot be reached."""
    gpu = GpuSample(0, 0, gpm="the GPU cannot be reached", missing={"handle": "the GPU is lost"})
    return Sample(1.7e9, (gpu,), None)


def without_gpu() -> Sample:
    return Sample(1.7e9, (), "there is none")

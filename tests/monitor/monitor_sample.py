"""Invented samples of the monitor."""

from __future__ import annotations

from dataclasses import replace

from flatout.monitor import GpuSample, HostSample, ProcessSample, Sample

GIB = 2**30


def h100() -> GpuSample:
    return GpuSample(
        index=0,
        cuda_index=0,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-8932f937",
        mig=False,
        util_percent=98.0,
        memory_util_percent=54.0,
        memory_used_bytes=57 * GIB,
        memory_total_bytes=80 * GIB,
        power_watts=648.3,
        power_limit_watts=700.0,
        sm_clock_mhz=1755,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=2619,
        memory_clock_max_mhz=2619,
        temperature_celsius=63,
        throttle=("power limit",),
        pcie_rx_bytes_per_second=1210.25 * 2**20,
        pcie_tx_bytes_per_second=310.5 * 2**20,
        sm_active_percent=93.1,
        sm_occupancy_percent=31.4,
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
    host = HostSample(
        cores=8,
        cpu_percent=61.0,
        per_cpu_percent=(100.0, 22.0),
        load=3.5,
        ram_used_bytes=20 * GIB,
        ram_available_bytes=44 * GIB,
        ram_total_bytes=64 * GIB,
        swap_used_bytes=GIB // 2,
        shm_used_bytes=GIB,
        shm_total_bytes=8 * GIB,
        disk_read_bytes_per_second=1.5 * 2**20,
        disk_write_bytes_per_second=0.0,
        network_received_bytes_per_second=300.0,
        missing={"network_sent_bytes_per_second": "not told"},
    )
    processes = (
        ProcessSample(100, 1, "python", 250.0, 3 * GIB, 2 * GIB),
        ProcessSample(101, 100, "pt_data_worker", 95.0, GIB, None),
    )
    return Sample(1.7e9, (h100(), t4()), None, host, 100, False, processes)


def without_gpu() -> Sample:
    return replace(whole(), gpus=(), no_gpu="there is none", pid=None, host=HostSample(4), processes=())


def ended() -> Sample:
    return replace(without_gpu(), pid=100, pid_ended=True)

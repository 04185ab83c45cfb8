"""Samples of the machine. Names contain units. A value that could not be read is None."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GpuSample:
    """Sample of one GPU or one MIG device.

    Attributes:
        index: NVML's number of the GPU (by PCI bus).
        cuda_index: the number by which torch knows it (``cuda:N``) in the watched process.
        name: the product.
        uuid: NVML's ``GPU-...``, or ``MIG-...`` of a MIG device.
        mig: whether the GPU is divided into MIG devices.
        util_percent: time in which any kernel ran, on however few SMs: 100 does not mean full.
        memory_util_percent: time in which device memory was read or written.
        memory_used_bytes: what processes hold (without the driver's own share where NVML tells it apart).
        memory_total_bytes: what there is.
        power_watts: draw now.
        power_limit_watts: limit that the driver enforces.
        sm_clock_mhz: SM clock now.
        sm_clock_max_mhz: highest SM clock.
        memory_clock_mhz: memory clock now.
        memory_clock_max_mhz: highest memory clock.
        temperature_celsius: of the die.
        throttle: what holds the clocks down, in words; empty when nothing does.
        pcie_rx_bytes_per_second: from host to GPU.
        pcie_tx_bytes_per_second: from GPU to host.
        sm_active_percent: SMs with at least one warp, averaged over time and SMs.
        sm_occupancy_percent: warps resident / the most there can be.
        tensor_active_percent: time in which the tensor cores worked.
        dram_active_percent: bandwidth of device memory in use / the most there can be.
        gpm: where the last four come from, or why there are none.
        missing: field that could not be read to the reason.
    """

    index: int
    cuda_index: int | None = None
    name: str | None = None
    uuid: str | None = None
    mig: bool | None = None
    util_percent: float | None = None
    memory_util_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    temperature_celsius: int | None = None
    throttle: tuple[str, ...] | None = None
    pcie_rx_bytes_per_second: float | None = None
    pcie_tx_bytes_per_second: float | None = None
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    gpm: str = ""
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostSample:
    """Sample of CPU, memory and disks, within the limits of a container.

    Attributes:
        cores: physical cores that may be kept busy, affinity and quota respected.
        cpu_percent: CPU time used / what may be used; None in the first sample.
        per_cpu_percent: the same of each logical CPU that may be used.
        load: runnable tasks, averaged over a minute.
        ram_used_bytes: memory that is not available.
        ram_available_bytes: what can be taken without swapping.
        ram_total_bytes: the container's limit, or the machine's memory.
        swap_used_bytes: swapped out, of the whole machine.
        shm_used_bytes: in /dev/shm, through which loader workers send tensors.
        shm_total_bytes: what fits in it.
        disk_read_bytes_per_second: by all disks of the machine.
        disk_write_bytes_per_second: to all disks of the machine.
        network_received_bytes_per_second: by all interfaces.
        network_sent_bytes_per_second: by all interfaces.
        missing: field that could not be read to the reason.
    """

    cores: int
    cpu_percent: float | None = None
    per_cpu_percent: tuple[float, ...] | None = None
    load: float | None = None
    ram_used_bytes: int | None = None
    ram_available_bytes: int | None = None
    ram_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_total_bytes: int | None = None
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    network_received_bytes_per_second: float | None = None
    network_sent_bytes_per_second: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessSample:
    """Sample of one process.

    Attributes:
        pid: its number.
        parent_pid: its parent's.
        name: as the system shows it; loader workers of newer torch are called ``pt_data_worker``.
        cpu_percent: of one logical CPU, so 250 is two and a half; None when it was not there before.
        rss_bytes: resident memory, shared pages included.
        uss_bytes: what only it has; looked up of one process at a time, the larger it is the rarer.
    """

    pid: int
    parent_pid: int | None
    name: str
    cpu_percent: float | None
    rss_bytes: int | None
    uss_bytes: int | None


@dataclass(frozen=True)
class Sample:
    """Sample of GPUs, host and processes.

    Attributes:
        time: Unix seconds.
        gpus: those that the watched process may use; all where it may use all.
        no_gpu: why ``gpus`` is empty, in one sentence.
        host: CPU, memory and disks.
        pid: the watched process; None where the whole machine is watched.
        pid_ended: whether it has come to its end.
        processes: the watched process and all that descend from it, or the machine's busiest.
    """

    time: float
    gpus: tuple[GpuSample, ...]
    no_gpu: str | None
    host: HostSample
    pid: int | None = None
    pid_ended: bool = False
    processes: tuple[ProcessSample, ...] = ()

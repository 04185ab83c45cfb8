"""Samples of the machine. Names contain units. A value that could not be read is None."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GpuSample:
    """Sample of one GPU or one MIG device.

    Attributes:
        index: NVML's number of the GPU, in order of the PCI bus; -1 if unknown.
        cuda_index: torch's number of the GPU (``cuda:N``) in the watched process.
        name: name of the product.
        uuid: NVML's ``GPU-...``, or ``MIG-...`` of a MIG device.
        mig: True if the GPU is divided into MIG devices.
        util_percent: share of time in which a kernel ran, on any number of SMs. A GPU at 100 may have idle SMs.
        memory_util_percent: share of time in which device memory was read or written.
        memory_used_bytes: memory of processes, without the driver's own share if NVML reports the share.
        memory_total_bytes: device memory.
        power_watts: present power draw.
        power_limit_watts: limit that the driver enforces.
        sm_clock_mhz: present SM clock.
        sm_clock_max_mhz: highest SM clock.
        memory_clock_mhz: present memory clock.
        memory_clock_max_mhz: highest memory clock.
        temperature_celsius: temperature of the die.
        throttle: reasons why the clocks are lowered, in words; empty if there is no reason.
        pcie_rx_bytes_per_second: transfers from host to GPU.
        pcie_tx_bytes_per_second: transfers from GPU to host.
        sm_active_percent: SMs with at least one warp, averaged over time and SMs.
        sm_occupancy_percent: resident warps, relative to the maximum.
        tensor_active_percent: share of time in which the tensor cores worked.
        dram_active_percent: used bandwidth of device memory, relative to the maximum.
        gpm: source of the four attributes above, or the reason why they are None.
        missing: reasons by the names of the fields that could not be read.
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
        cores: number of usable physical cores, within affinity and quota.
        cpu_percent: used CPU time, relative to the usable CPU time; None in the first sample.
        per_cpu_percent: the same for each usable logical CPU.
        load: load average of the last minute.
        ram_used_bytes: memory that is not available.
        ram_available_bytes: memory that is available without swapping.
        ram_total_bytes: limit of the container, or memory of the machine.
        swap_used_bytes: used swap space of the whole machine.
        shm_used_bytes: used space of /dev/shm, through which loader workers send tensors.
        shm_total_bytes: size of /dev/shm.
        disk_read_bytes_per_second: reads from all disks of the machine.
        disk_write_bytes_per_second: writes to all disks of the machine.
        network_received_bytes_per_second: data received on all interfaces.
        network_sent_bytes_per_second: data sent on all interfaces.
        missing: reasons by the names of the fields that could not be read.
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
        pid: number of the process.
        parent_pid: number of the parent process.
        name: name in the system. Loader workers of newer torch have the name ``pt_data_worker``.
        cpu_percent: CPU time relative to one logical CPU, so 250 is two and a half CPUs; None in the first sample.
        rss_bytes: resident memory, with shared pages.
        uss_bytes: memory that no other process shares; None before the first look-up. A sample looks up at most one
            process. Slow look-ups are rarer.
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
        time: Unix time, seconds.
        gpus: GPUs that the watched process may use.
        no_gpu: reason why ``gpus`` is empty, in one sentence; None if ``gpus`` is not empty.
        host: CPU, memory and disks.
        pid: number of the watched process; None if the whole machine is watched.
        pid_ended: True if the watched process has ended.
        processes: watched process and its descendants, or the busiest processes of the machine.
    """

    time: float
    gpus: tuple[GpuSample, ...]
    no_gpu: str | None
    host: HostSample
    pid: int | None = None
    pid_ended: bool = False
    processes: tuple[ProcessSample, ...] = ()

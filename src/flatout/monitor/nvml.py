"""GPUs by NVML. A query that fails leaves its field None and records the reason."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from flatout.core.formatting import first_line

NOT_INSTALLED = "nvidia-ml-py is not installed: pip install 'flatout[monitor]'"
UNKNOWN_ORDER = "the GPUs differ and CUDA numbers the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
FIRST_SAMPLE = "from the second sample on"
BEFORE_HOPPER = "needs Hopper or later"

_THROTTLE = {  # bits of the clock event reasons, as nvml.h numbers them
    0x001: "idle",
    0x002: "clocks set by hand",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat (driver)",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}

_QUERIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    # field: query of (nvml, device, GPU), where the device is a MIG device of the GPU, or the GPU
    "name": lambda nvml, device, gpu: nvml.nvmlDeviceGetName(device),
    "uuid": lambda nvml, device, gpu: nvml.nvmlDeviceGetUUID(device),
    "util_percent": lambda nvml, device, gpu: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
    "memory_used_bytes": lambda nvml, device, gpu: int(_memory(nvml, device).used),
    "memory_total_bytes": lambda nvml, device, gpu: int(_memory(nvml, device).total),
    "power_watts": lambda nvml, device, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "power_limit_watts": lambda nvml, device, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "sm_clock_mhz": lambda nvml, device, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "sm_clock_max_mhz": lambda nvml, device, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "temperature_celsius": lambda nvml, device, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "throttle": lambda nvml, device, gpu: _throttle(nvml, gpu),
}


class Gpus:
    """GPUs that this process may use. NVML is opened again after a shutdown or a fork."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._pid: int | None = None  # process in which NVML is open
        self._gpm: dict[int | str, Any] = {}  # last GPM sample of each device

    def sample(self) -> tuple[tuple[GpuSample, ...], str | None]:
        """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` allows, or the reason for none. Never raise."""
        try:
            nvml = self._open()
        except ImportError:
            return (), NOT_INSTALLED
        except Exception as error:  # NVMLError, or any error of a broken installation
            return (), f"NVML cannot be used: {first_line(error)}"
        try:
            count = nvml.nvmlDeviceGetCount()
        except Exception as error:
            self.close()
            return (), f"NVML cannot count the GPUs: {first_line(error)}"
        if not count:
            return (), "NVML finds no GPU"
        handles = [_attempt(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        uuids = [_attempt(nvml.nvmlDeviceGetUUID, handle) for handle in handles]
        devices = visible_devices(os.environ, uuids, [_attempt(nvml.nvmlDeviceGetName, handle) for handle in handles])
        if not devices:
            return (), f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r} leaves no GPU"
        return tuple(self._gpu(name, cuda_index) for name, cuda_index in devices.items()), None

    def close(self) -> None:
        """Release NVML."""
        if self._pid == os.getpid():  # after a fork, only the parent releases NVML
            for sample in self._gpm.values():
                _attempt(self._nvml.nvmlGpmSampleFree, sample)
            _attempt(self._nvml.nvmlShutdown)
        self._gpm.clear()
        self._pid = None

    def _open(self) -> Any:
        if self._pid != os.getpid():
            self._gpm.clear()  # samples of a closed session
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._pid = os.getpid()
        return self._nvml

    def _gpu(self, name: int | str, cuda_index: int | None) -> GpuSample:
        nvml = self._nvml
        missing = {} if cuda_index is not None else {"cuda_index": UNKNOWN_ORDER}
        try:
            if isinstance(name, int):
                index, device = name, nvml.nvmlDeviceGetHandleByIndex(name)
                gpu = device
            else:
                device = nvml.nvmlDeviceGetHandleByUUID(name)
                gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
                index = nvml.nvmlDeviceGetIndex(gpu)
        except Exception as error:
            index, uuid = (name, None) if isinstance(name, int) else (-1, name)
            missing["handle"] = first_line(error)
            return GpuSample(index, cuda_index, uuid=uuid, gpm="the GPU cannot be reached", missing=missing)
        values: dict[str, Any] = {}
        for attribute, query in _QUERIES.items():
            try:
                values[attribute] = query(nvml, device, gpu)
            except Exception as error:  # NVMLError, or an old nvidia-ml-py without the function
                missing[attribute] = first_line(error)
        try:
            activity, source = self._activity(name, device, gpu)
        except Exception as error:
            activity, source = {}, f"NVML's GPM fails: {first_line(error)}"
        return GpuSample(index, cuda_index, **values, **activity, gpm=source, missing=missing)

    def _activity(self, name: int | str, device: Any, gpu: Any) -> tuple[dict[str, Any], str]:
        """Return GPM's metrics, averaged since the last sample, and their source or the reason for none."""
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            return {}, BEFORE_HOPPER
        now = nvml.nvmlGpmSampleAlloc()
        before, self._gpm[name] = self._gpm.get(name), now
        try:
            if isinstance(name, int):
                nvml.nvmlGpmSampleGet(gpu, now)
            else:
                nvml.nvmlGpmMigSampleGet(gpu, nvml.nvmlDeviceGetGpuInstanceId(device), now)
            return ({}, FIRST_SAMPLE) if before is None else (_metrics(nvml, before, now), "NVML GPM")
        except Exception:
            _attempt(nvml.nvmlGpmSampleFree, self._gpm.pop(name))
            raise
        finally:
            if before is not None:
                _attempt(nvml.nvmlGpmSampleFree, before)


def _metrics(nvml: Any, before: Any, now: Any) -> dict[str, Any]:
    """Return GPM's metrics between two samples. Metrics that the GPU lacks are absent."""
    fields = {
        nvml.NVML_GPM_METRIC_SM_UTIL: "sm_active_percent",
        nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_active_percent",
        nvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram_active_percent",
    }
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(fields)
    request.sample1, request.sample2 = before, now
    for slot, number in enumerate(fields):
        request.metrics[slot].metricId = number
    nvml.nvmlGpmMetricsGet(request)
    found = {attribute: request.metrics[slot] for slot, attribute in enumerate(fields.values())}
    return {
        attribute: metric.value
        for attribute, metric in found.items()
        if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value)
    }


def _throttle(nvml: Any, gpu: Any) -> tuple[str, ...]:
    """Return the clock event reasons in words. An unknown bit keeps its number."""
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except nvml.NVMLError_FunctionNotFound:  # a driver before 535
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return tuple(_THROTTLE.get(1 << place, f"reason {1 << place:#x}") for place in range(64) if bits >> place & 1)


def _memory(nvml: Any, device: Any) -> Any:
    """Return the memory. If NVML reports the driver's share, ``used`` excludes this share."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    except Exception:
        return nvml.nvmlDeviceGetMemoryInfo(device)


def _attempt(query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML function, or None if the function fails."""
    try:
        return query(*arguments)
    except Exception:
        return None


def visible_devices(
    environment: Mapping[str, str], uuids: Sequence[str | None], names: Sequence[str | None]
) -> dict[int | str, int | None]:
    """Return the devices of ``CUDA_VISIBLE_DEVICES``, as CUDA does, up to the first entry that names no GPU.

    NVML numbers the GPUs by PCI bus. CUDA numbers the fastest GPU first, unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. On a
    machine with different GPUs, CUDA's numbers are therefore unknown. If the variable is not set or begins with such a
    number, the result is all GPUs, without numbers of torch.

    Args:
        environment: environment variables of the process.
        uuids: UUIDs of NVML's GPUs, in order; None for a UUID that could not be read.
        names: names of NVML's GPUs, in order; None for a name that could not be read.

    Returns:
        NVML's number of each GPU, or the UUID of each MIG device, to torch's number, which is None if unknown.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    is_ordered = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({*names} - {None}) <= 1
    entries = [entry.strip() for entry in (listed or "").split(",")]
    if listed is None or (not is_ordered and _is_number(entries[0])):
        return {index: index if is_ordered else None for index in range(len(uuids))}
    found: dict[int | str, int | None] = {}
    for entry in entries:
        device = _device(entry, uuids)
        if device is None:
            break
        if device in found:
            return {}  # CUDA shows no GPU if one GPU is named twice
        found[device] = len(found)
    return found


def _device(entry: str, uuids: Sequence[str | None]) -> int | str | None:
    if entry.startswith("MIG-"):
        return entry
    if _is_number(entry):
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and (uuid or "").startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _is_number(entry: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", entry) is not None


@dataclass(frozen=True)
class GpuSample:
    """Sample of one GPU or one MIG device.

    Attributes:
        index: NVML's number of the GPU, in order of the PCI bus; -1 if unknown.
        cuda_index: torch's number of the GPU (``cuda:N``).
        name: name of the product.
        uuid: NVML's ``GPU-...``, or ``MIG-...`` of a MIG device.
        util_percent: share of time in which a kernel ran, on any number of SMs. A GPU at 100 may have idle SMs.
        memory_used_bytes: memory of processes, without the driver's own share if NVML reports the share.
        memory_total_bytes: device memory.
        power_watts: present power draw.
        power_limit_watts: limit that the driver enforces.
        sm_clock_mhz: present SM clock.
        sm_clock_max_mhz: highest SM clock.
        temperature_celsius: temperature of the die.
        throttle: reasons why the clocks are lowered, in words; empty if there is no reason.
        sm_active_percent: SMs with at least one warp, averaged over time and SMs.
        tensor_active_percent: share of time in which the tensor cores worked.
        dram_active_percent: used bandwidth of device memory, relative to the maximum.
        gpm: ``NVML GPM``, the source of the three attributes above, or the reason why they are None.
        missing: reasons by the names of the other fields that could not be read.
    """

    index: int
    cuda_index: int | None = None
    name: str | None = None
    uuid: str | None = None
    util_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    temperature_celsius: int | None = None
    throttle: tuple[str, ...] | None = None
    sm_active_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    gpm: str = ""
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """Sample of all GPUs.

    Attributes:
        time: Unix time, seconds.
        gpus: GPUs that this process may use.
        no_gpu: reason why ``gpus`` is empty, in one sentence; None if ``gpus`` is not empty.
    """

    time: float
    gpus: tuple[GpuSample, ...]
    no_gpu: str | None


class JsonLines:
    """Writer of samples, for ``Sampler(write=JsonLines("run.jsonl"))``.

    The writer appends to an existing file. Each sample is one write, so a crash or a fork leaves whole lines.
    """

    def __init__(self, file: str | os.PathLike[str] | TextIO) -> None:
        """Open the file.

        Args:
            file: a path, or an open text file, which the caller closes.

        Raises:
            OSError: the file cannot be written.
        """
        self._own = open(file, "ab", buffering=0) if isinstance(file, (str, os.PathLike)) else None  # noqa: SIM115
        self._file = None if isinstance(file, (str, os.PathLike)) else file

    def __call__(self, sample: Sample) -> None:
        """Write one sample."""
        line = json.dumps(asdict(sample), allow_nan=False, separators=(",", ":")) + "\n"
        if self._own is not None:
            rest = line.encode()
            while rest:  # a full disk accepts a part of a line, and the next write raises
                rest = rest[self._own.write(rest) :]
        elif self._file is not None:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file if the writer opened it."""
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yield the samples of a file that ``JsonLines`` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a sample.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                for gpu in found["gpus"]:
                    gpu["throttle"] = None if gpu["throttle"] is None else tuple(gpu["throttle"])
                yield Sample(**{**found, "gpus": tuple(GpuSample(**gpu) for gpu in found["gpus"])})
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number} is no sample: {error}") from error

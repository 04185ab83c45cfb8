"""Samples of GPUs from NVML. A query that fails leaves its field None and records the reason."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flatout.monitor.dcgm import NOT_ASKED, Dcgm
from flatout.monitor.reasons import reason
from flatout.monitor.sample import GpuSample
from flatout.monitor.visible import UNKNOWN_ORDER, Wanted, visible_devices

NOT_INSTALLED = "nvidia-ml-py is not installed: pip install 'flatout[monitor]'"
FIRST_SAMPLE = "from the second sample on"
BEFORE_HOPPER = "needs Hopper or later"
WHOLE_MIG = "NVML does not tell it of this GPU; where MIG is on, name a MIG device in CUDA_VISIBLE_DEVICES"
_MIB = 2**20

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


class Gpus:
    """GPUs of a watched process. NVML is opened again after a shutdown or a fork."""

    def __init__(self, interval: float, *, dcgm: bool = False) -> None:
        self._dcgm = Dcgm(interval) if dcgm else None
        self._nvml: Any = None
        self._pid: int | None = None  # process in which NVML is open
        self._gpm: dict[Wanted, _Gpm] = {}

    def sample(self, environment: Mapping[str, str]) -> tuple[tuple[GpuSample, ...], str | None]:
        """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` allows, or the reason for none. Never raise."""
        try:
            nvml = self._open()
        except ImportError:
            return (), NOT_INSTALLED
        except Exception as error:  # NVMLError, or any error of a broken installation
            return (), f"NVML cannot be used: {reason(error)}"
        try:
            count = nvml.nvmlDeviceGetCount()
        except Exception as error:
            self._shut_down()
            return (), f"NVML cannot count the GPUs: {reason(error)}"
        if not count:
            return (), "NVML finds no GPU"
        identities = [self._identity(index) for index in range(count)]
        wanted = visible_devices(environment, [uuid for uuid, _ in identities], [name for _, name in identities])
        if not wanted:
            return (), f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', '')!r} leaves no GPU"
        return tuple(map(self._gpu, wanted)), None

    def close(self) -> None:
        """Release NVML and DCGM."""
        if self._dcgm is not None:
            self._dcgm.close()
        self._shut_down()

    def _shut_down(self) -> None:
        if self._pid == os.getpid():  # after a fork, only the parent releases NVML
            for gpm in self._gpm.values():
                gpm.close()
            _attempt(self._nvml.nvmlShutdown)
        self._gpm.clear()
        self._pid = None

    def _open(self) -> Any:
        if self._pid != os.getpid():
            self._gpm.clear()  # GPM samples of a closed session
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._pid = os.getpid()
        return self._nvml

    def _identity(self, index: int) -> tuple[str | None, str | None]:
        nvml = self._nvml
        handle = _attempt(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return None, None
        return _attempt(lambda: nvml.nvmlDeviceGetUUID(handle)), _attempt(lambda: nvml.nvmlDeviceGetName(handle))

    def _gpu(self, wanted: Wanted) -> GpuSample:
        nvml = self._nvml
        missing: dict[str, str] = {}
        if wanted.cuda_index is None:
            missing["cuda_index"] = UNKNOWN_ORDER

        def read(field: str, query: Callable[[], Any]) -> Any:
            try:
                return query()
            except Exception as error:  # NVMLError, or an old nvidia-ml-py without the function
                missing[field] = reason(error)
                if type(error).__name__ == "NVMLError_Uninitialized":
                    self._pid = None
                return None

        index, mig_uuid = wanted.index, wanted.mig_uuid
        if mig_uuid is None:
            part = gpu = read("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        else:
            part = read("handle", lambda: nvml.nvmlDeviceGetHandleByUUID(mig_uuid))
            gpu = part and read("handle", lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
            index = gpu and read("index", lambda: nvml.nvmlDeviceGetIndex(gpu))
        number = -1 if index is None else index
        if gpu is None:
            return GpuSample(number, wanted.cuda_index, uuid=mig_uuid, gpm="the GPU cannot be reached", missing=missing)

        util = read("util_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(part))
        if util is None:
            missing["memory_util_percent"] = missing["util_percent"]
        memory = read("memory_used_bytes", lambda: _memory(nvml, part))
        if memory is None:
            missing["memory_total_bytes"] = missing["memory_used_bytes"]
        profiled, source = self._profile(wanted, part, gpu)
        rates = {}
        for way, counter in (("rx", nvml.NVML_PCIE_UTIL_RX_BYTES), ("tx", nvml.NVML_PCIE_UTIL_TX_BYTES)):
            name = f"pcie_{way}_bytes_per_second"  # NVML's own counter blocks for 20 ms, unlike GPM's
            rates[name] = profiled.pop(name, None)
            if rates[name] is None:
                rates[name] = read(name, partial(_bytes_per_second, nvml, gpu, counter))
        return GpuSample(
            index=number,
            cuda_index=wanted.cuda_index,
            name=read("name", lambda: nvml.nvmlDeviceGetName(part)),
            uuid=read("uuid", lambda: nvml.nvmlDeviceGetUUID(part)),
            mig=read("mig", lambda: bool(nvml.nvmlDeviceGetMigMode(gpu)[0])),
            util_percent=util and float(util.gpu),
            memory_util_percent=util and float(util.memory),
            memory_used_bytes=memory and int(memory.used),
            memory_total_bytes=memory and int(memory.total),
            power_watts=read("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            power_limit_watts=read("power_limit_watts", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
            sm_clock_mhz=read("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            sm_clock_max_mhz=read("sm_clock_max_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=read("memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            memory_clock_max_mhz=read(
                "memory_clock_max_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM)
            ),
            temperature_celsius=read(
                "temperature_celsius", lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
            throttle=read("throttle", lambda: throttle_words(_throttle_bits(nvml, gpu))),
            **rates,
            **profiled,
            gpm=source,
            missing=missing,
        )

    def _profile(self, wanted: Wanted, part: Any, gpu: Any) -> tuple[dict[str, float], str]:
        """Return the metrics of GPM or DCGM, with their source or the reason for none."""
        nvml = self._nvml
        try:
            gpm = self._gpm.get(wanted)
            if gpm is None:
                if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
                    return self._ask_dcgm(part, BEFORE_HOPPER)
                instance = nvml.nvmlDeviceGetGpuInstanceId(part) if wanted.mig_uuid else None
                gpm = self._gpm[wanted] = _Gpm(nvml, gpu, instance)
            found = gpm.values()
        except Exception as error:
            if type(error).__name__ in ("NVMLError_NotSupported", "NVMLError_FunctionNotFound"):
                return self._ask_dcgm(part, WHOLE_MIG if wanted in self._gpm else BEFORE_HOPPER)
            return {}, f"NVML's GPM failed: {reason(error)}"
        return (found, "NVML GPM") if found else ({}, FIRST_SAMPLE)

    def _ask_dcgm(self, part: Any, why: str) -> tuple[dict[str, float], str]:
        """Return DCGM's metrics, or the reasons why GPM and DCGM have none."""
        if self._dcgm is None:
            return {}, f"{why}; {NOT_ASKED}"
        found, said = self._dcgm.values(_attempt(lambda: self._nvml.nvmlDeviceGetUUID(part)))
        return (found, said) if found else ({}, f"{why}; {said}")


class _Gpm:
    """GPM's metrics of one GPU, averaged since the previous sample."""

    def __init__(self, nvml: Any, gpu: Any, gpu_instance: int | None) -> None:
        self._nvml, self._gpu, self._gpu_instance = nvml, gpu, gpu_instance
        self._fields = {
            nvml.NVML_GPM_METRIC_SM_UTIL: ("sm_active_percent", 1),
            nvml.NVML_GPM_METRIC_SM_OCCUPANCY: ("sm_occupancy_percent", 1),
            nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: ("tensor_active_percent", 1),
            nvml.NVML_GPM_METRIC_DRAM_BW_UTIL: ("dram_active_percent", 1),
            nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: ("pcie_rx_bytes_per_second", _MIB),
            nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: ("pcie_tx_bytes_per_second", _MIB),
        }
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(self._fields)
        for slot, metric in enumerate(self._fields):
            self._request.metrics[slot].metricId = metric
        self._before = self._now = None
        self._primed = False
        self._before = nvml.nvmlGpmSampleAlloc()
        try:
            self._now = nvml.nvmlGpmSampleAlloc()
        except Exception:
            self.close()
            raise

    def values(self) -> dict[str, float]:
        """Return the metrics since the last call. The first call has none. Metrics that the GPU lacks are absent."""
        nvml = self._nvml
        if self._gpu_instance is None:
            nvml.nvmlGpmSampleGet(self._gpu, self._now)
        else:
            nvml.nvmlGpmMigSampleGet(self._gpu, self._gpu_instance, self._now)
        self._before, self._now = self._now, self._before
        if not self._primed:
            self._primed = True
            return {}
        self._request.sample1, self._request.sample2 = self._now, self._before  # the older sample first
        nvml.nvmlGpmMetricsGet(self._request)
        found = {}
        for slot, (field, scale) in enumerate(self._fields.values()):
            metric = self._request.metrics[slot]
            if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value):
                found[field] = metric.value * scale
        return found

    def close(self) -> None:
        """Free the two samples."""
        for sample in (self._before, self._now):
            if sample is not None:
                _attempt(partial(self._nvml.nvmlGpmSampleFree, sample))


def throttle_words(bits: int) -> tuple[str, ...]:
    """Return clock event reasons in words. An unknown bit keeps its number."""
    return tuple(_THROTTLE.get(1 << place, f"reason {1 << place:#x}") for place in range(64) if bits >> place & 1)


def _throttle_bits(nvml: Any, gpu: Any) -> int:
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except Exception as error:  # a driver before 535, or an nvidia-ml-py of that age
        if type(error).__name__ not in ("NVMLError_FunctionNotFound", "AttributeError"):
            raise
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)


def _bytes_per_second(nvml: Any, gpu: Any, counter: int) -> float:
    return 1024.0 * nvml.nvmlDeviceGetPcieThroughput(gpu, counter)  # KiB/s


def _memory(nvml: Any, device: Any) -> Any:
    """Return the memory. If NVML reports the driver's share, ``used`` excludes this share."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    except Exception:
        return nvml.nvmlDeviceGetMemoryInfo(device)


def _attempt(query: Callable[[], Any]) -> Any:
    try:
        return query()
    except Exception:
        return None

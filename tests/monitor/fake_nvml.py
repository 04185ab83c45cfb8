"""Fake ``pynvml`` with the names of the real module. The fake replays a recording, and fails or hangs on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

ERRORS = {  # code of nvml.h to nvidia-ml-py's class
    1: "Uninitialized",
    2: "InvalidArgument",
    3: "NotSupported",
    4: "NoPermission",
    6: "NotFound",
    9: "DriverNotLoaded",
    10: "Timeout",
    12: "LibraryNotFound",
    13: "FunctionNotFound",
    15: "GpuIsLost",
    16: "ResetRequired",
    18: "LibRmVersionMismatch",
    25: "ArgumentVersionMismatch",
    28: "GpuNotFound",
    999: "Unknown",
}


class NVMLError(Exception):
    def __str__(self) -> str:
        return f"text of {type(self).__name__}"


CLASSES = {name: type(f"NVMLError_{name}", (NVMLError,), {}) for name in ERRORS.values()}


@dataclass(frozen=True)
class Board:
    """Recorded figures of one GPU."""

    name: str
    uuid: str
    memory_total: int
    memory_used: int
    power: int  # milliwatts
    power_limit: int | None
    sm_clock: tuple[int, int]
    temperature: int
    util: int
    throttle: int
    gpm: dict[int, float] | None = None
    mig_devices: tuple[str, ...] = ()


H100 = Board(
    name="NVIDIA H100 80GB HBM3",
    uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    memory_total=85_520_809_984,
    memory_used=61_203_283_968,
    power=648_312,
    power_limit=700_000,
    sm_clock=(1755, 1980),
    temperature=63,
    util=98,
    throttle=0x4,
    gpm={2: 93.1, 5: 47.8, 10: 52.9},
)
A100 = Board(
    name="NVIDIA A100-SXM4-40GB",
    uuid="GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c",
    memory_total=42_949_672_960,
    memory_used=30_511_464_448,
    power=312_401,
    power_limit=400_000,
    sm_clock=(1410, 1410),
    temperature=55,
    util=91,
    throttle=0,
)
T4 = Board(
    name="Tesla T4",
    uuid="GPU-a1b2c3d4-0000-1111-2222-333344445555",
    memory_total=16_106_127_360,
    memory_used=1_073_741_824,
    power=31_020,
    power_limit=None,
    sm_clock=(585, 1590),
    temperature=81,
    util=0,
    throttle=0x21,
)
MIG = replace(H100, mig_devices=("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",))


@dataclass(frozen=True)
class Handle:
    board: Board
    mig_uuid: str | None = None


@dataclass
class FakeNvml:
    """Fake of the module ``pynvml``.

    Attributes:
        boards: the GPUs, in the order of NVML.
        failures: function to the name of the error that it raises.
        before: function that is called with the name of each function before the answer, to count or to hang.
        memory_v2: True if the driver reports its own share of the memory.
        metrics: GPM's metric to the code and value of its answer. With an error, the value is old memory content.
    """

    boards: tuple[Board, ...] = (H100,)
    failures: dict[str, str] = field(default_factory=dict)
    before: Callable[[str], object] = lambda name: None
    memory_v2: bool = True
    metrics: dict[int, tuple[int, float]] = field(default_factory=dict)
    open: int = 0
    gpm_samples: set[int] = field(default_factory=set)

    NVML_SUCCESS = 0
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 5, 10
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlMemory_v2 = 0x02000028
    NVMLError_FunctionNotFound = CLASSES["FunctionNotFound"]

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("nvml") or not callable(found):
            return found

        def called(*args: Any, **kwargs: Any) -> Any:
            self.before(name)
            if name in self.failures:
                raise CLASSES[self.failures[name]]
            if name != "nvmlInit" and not self.open:
                raise CLASSES["Uninitialized"]
            return found(*args, **kwargs)

        return called

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        return Handle(self.boards[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        for board in self.boards:
            if uuid in board.mig_devices:
                return Handle(board, uuid)
        raise CLASSES["NotFound"]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Handle) -> Handle:
        return Handle(handle.board)

    def nvmlDeviceGetIndex(self, handle: Handle) -> int:
        return self.boards.index(handle.board)

    def nvmlDeviceGetGpuInstanceId(self, handle: Handle) -> int:
        return 7

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return handle.board.name + (" MIG 1g.10gb" if handle.mig_uuid else "")

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return handle.mig_uuid or handle.board.uuid

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> SimpleNamespace:
        if handle.mig_uuid:
            raise CLASSES["NotSupported"]
        return SimpleNamespace(gpu=handle.board.util)

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> SimpleNamespace:
        if version and not self.memory_v2:
            raise CLASSES["FunctionNotFound"]
        reserved = 0 if version else 500_000_000  # version 1 counts the driver's share as used
        return SimpleNamespace(total=handle.board.memory_total, used=handle.board.memory_used + reserved)

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        return handle.board.power

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        if handle.board.power_limit is None:
            raise CLASSES["NotSupported"]
        return handle.board.power_limit

    def nvmlDeviceGetClockInfo(self, handle: Handle, clock: int) -> int:
        return {1: handle.board.sm_clock}[clock][0]

    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, clock: int) -> int:
        return {1: handle.board.sm_clock}[clock][1]

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        return handle.board.temperature

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        return handle.board.throttle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle) -> int:
        return handle.board.throttle

    def nvmlGpmQueryDeviceSupport(self, handle: Handle) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(handle.board.gpm is not None))

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        sample = SimpleNamespace(board=None, order=0)
        self.gpm_samples.add(id(sample))
        return sample

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self.gpm_samples.remove(id(sample))

    def nvmlGpmSampleGet(self, handle: Handle, sample: SimpleNamespace) -> None:
        self.clock = getattr(self, "clock", 0) + 1
        sample.board, sample.order = handle.board, self.clock

    def nvmlGpmMigSampleGet(self, handle: Handle, instance: int, sample: SimpleNamespace) -> None:
        assert instance == 7
        self.nvmlGpmSampleGet(handle, sample)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> None:
        assert request.version == self.NVML_GPM_METRICS_GET_VERSION
        assert 0 < request.sample1.order < request.sample2.order, "the older sample comes first"
        for metric in request.metrics[: request.numMetrics]:
            known = request.sample1.board.gpm
            metric.nvmlReturn = 0 if metric.metricId in known else 3
            metric.value = known.get(metric.metricId, float("nan"))
            if metric.metricId in self.metrics:
                metric.nvmlReturn, metric.value = self.metrics[metric.metricId]


FUNCTIONS = sorted(name for name in vars(FakeNvml) if name.startswith("nvml") and callable(vars(FakeNvml)[name]))

"""Fake of DCGM's Python bindings, the module ``DcgmReader``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.monitor.fake_nvml import A100


@dataclass
class FakeDcgm:
    """Fake module.

    Attributes:
        failures: method of a reader to the message of its error.
        values: latest values of each GPU, by DCGM's field numbers. Empty if the host engine is gone.
        open: number of readers that are not shut down.
        asked: called methods, in order.
        options: options of the last reader.
    """

    failures: dict[str, str] = field(default_factory=dict)
    values: dict[int, dict[int, float]] = field(default_factory=lambda: {4: {1004: 0.9}, 5: {1002: 0.75, 1004: 0.5}})
    open: int = 0
    asked: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, name: str) -> None:
        self.asked.append(name)
        if name in self.failures:
            raise RuntimeError(self.failures[name])

    def DcgmReader(self, **options: Any) -> Reader:
        self.options = options
        return Reader(self)


class Reader:
    """Fake of the part of DCGM's reader that the monitor uses."""

    def __init__(self, dcgm: FakeDcgm) -> None:
        self.dcgm = dcgm
        self.m_gpuIdToUUId: dict[int, bytes] = {}
        dcgm.open += 1

    def Init(self) -> None:
        self.dcgm.call("Init")
        self.m_gpuIdToUUId = {5: A100.uuid.encode()}

    def GetLatestGpuValuesAsFieldIdDict(self) -> dict[int, dict[int, float]]:
        self.dcgm.call("GetLatestGpuValuesAsFieldIdDict")
        return self.dcgm.values

    def Shutdown(self) -> None:
        self.dcgm.open -= 1
        self.dcgm.call("Shutdown")

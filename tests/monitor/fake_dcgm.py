"""A fake of DCGM's Python bindings, the module ``DcgmReader``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.monitor.fake_nvml import A100


@dataclass
class FakeDcgm:
    """Stands in for the module.

    Attributes:
        failures: method of a reader to what its error says.
        values: of each GPU, by DCGM's own numbers; empty where the host engine is gone.
        open: the readers that were made and not shut down.
        asked: the methods that were called, in order.
        options: of the last reader.
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
    """DCGM's own reader, as far as it is used."""

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

"""Tensor-core activity before Hopper: through DCGM, where its Python bindings and its host engine are there."""

from __future__ import annotations

import os
from typing import Any

from flatout.monitor.reasons import reason

NOT_IMPORTABLE = "needs Hopper or later; before it DCGM, whose Python bindings (DcgmReader) are not on sys.path"

_FIELDS = {  # DCGM_FI_PROF_*: all four are ratios
    1002: "sm_active_percent",
    1003: "sm_occupancy_percent",
    1004: "tensor_active_percent",
    1005: "dram_active_percent",
}


class Dcgm:
    """DCGM's profiling fields of all GPUs; a failure is final, so that a dead host engine is not called for ever.

    DCGM holds the hardware counters while it watches these fields: profilers (CUPTI, Nsight) fail meanwhile.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._reader: Any = None
        self._failure = ""

    def values(self, uuid: str | None) -> tuple[dict[str, float], str]:
        """Fields of a GPU, and where they come from, or none and why."""
        if self._failure:
            return {}, self._failure
        try:
            if self._reader is None:
                self._reader = _open(self._interval)
            by_gpu = self._reader.GetLatestGpuValuesAsFieldIdDict()
            for gpu, found in by_gpu.items():
                if _text(self._reader.m_gpuIdToUUId.get(gpu)) == uuid:
                    return {name: 100 * found[number] for number, name in _FIELDS.items() if number in found}, "DCGM"
        except ImportError:
            self._failure = NOT_IMPORTABLE
        except Exception as error:  # any fault of the bindings: sampling goes on
            self._failure = f"needs Hopper or later; before it DCGM, which failed: {reason(error)}"
        return {}, self._failure or "DCGM does not know this GPU"

    def close(self) -> None:
        """Disconnects; the fields are no longer watched."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.Shutdown()


def _open(interval: float) -> Any:
    from DcgmReader import DcgmReader  # beside DCGM's own library, not on PyPI

    reader = DcgmReader(
        fieldIds=list(_FIELDS),
        updateFrequency=int(interval * 1e6),
        maxKeepAge=10 * interval,
        fieldGroupName=f"flatout_{os.getpid()}",
    )
    reader.Init()
    return reader


def _text(uuid: str | bytes | None) -> str | None:
    return uuid.decode() if isinstance(uuid, bytes) else uuid

"""Tensor-core activity of GPUs before Hopper, from DCGM's Python bindings.

DCGM is off by default. While DCGM watches these fields, it holds the hardware counters, and profilers that use CUPTI
(``torch.profiler``, Nsight) fail. The bindings also open a connection to the host engine, and log its errors in the
root logger.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from flatout.monitor.reasons import reason

NOT_ASKED = "DCGM may tell, if asked: Sampler(dcgm=True), --dcgm"
NOT_IMPORTABLE = "DCGM's Python bindings (DcgmReader) are not on sys.path"
NO_ENGINE = "DCGM's host engine does not answer"
INHERITED = "DCGM is connected in the process that this one was forked from"

_FIELDS = {  # DCGM_FI_PROF_*: all four are ratios
    1002: "sm_active_percent",
    1003: "sm_occupancy_percent",
    1004: "tensor_active_percent",
    1005: "dram_active_percent",
}


class Dcgm:
    """DCGM's profiling fields of all GPUs. The first failure is final, so that a dead host engine is called once."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._reader: Any = None
        self._pid = 0  # process that is connected
        self._failure = ""

    def values(self, uuid: str | None) -> tuple[dict[str, float], str]:
        """Return the fields of a GPU and their source, or no fields and the reason."""
        if self._failure:
            return {}, self._failure
        if self._reader is not None and self._pid != os.getpid():
            return {}, INHERITED
        try:
            if self._reader is None:
                self._reader, self._pid = _new_reader(self._interval), os.getpid()
                self._reader.Init()
            by_gpu = self._reader.GetLatestGpuValuesAsFieldIdDict()
            if not by_gpu:  # the bindings log a lost connection, and reconnect in every call
                raise ConnectionError(NO_ENGINE)
            for gpu, found in by_gpu.items():
                if _text(self._reader.m_gpuIdToUUId.get(gpu)) == uuid:
                    return {name: 100 * found[number] for number, name in _FIELDS.items() if number in found}, "DCGM"
        except ImportError:
            self._failure = NOT_IMPORTABLE
        except ConnectionError as error:
            self._failure = str(error)
        except Exception as error:  # errors of the bindings must not end the sampling
            self._failure = f"DCGM failed: {reason(error)}"
        if self._failure:
            self.close()
        return {}, self._failure or "DCGM does not know this GPU"

    def close(self) -> None:
        """Disconnect and stop watching the fields. In a forked child, the parent stays connected."""
        if self._reader is not None and self._pid == os.getpid():
            with suppress(Exception):  # the host engine may have ended
                self._reader.Shutdown()
            self._reader = None


def _new_reader(interval: float) -> Any:
    from DcgmReader import DcgmReader  # part of a DCGM installation, not on PyPI

    return DcgmReader(
        fieldIds=list(_FIELDS),
        updateFrequency=int(interval * 1e6),
        maxKeepAge=10 * interval,
        fieldGroupName=f"flatout_{os.getpid()}",
    )


def _text(uuid: str | bytes | None) -> str | None:
    return uuid.decode() if isinstance(uuid, bytes) else uuid

"""Reasons why a value could not be read, in words."""

from __future__ import annotations

_NVML = {
    "Uninitialized": "NVML was shut down in this process; it is opened again",
    "NotSupported": "not supported by this GPU or its driver",
    "NoPermission": "needs more permission than this user has",
    "GpuIsLost": "the GPU has fallen off the bus or is otherwise unreachable",
    "Timeout": "the driver did not answer in time",
    "LibraryNotFound": "no NVIDIA driver library (libnvidia-ml) was found",
    "DriverNotLoaded": "the NVIDIA driver is not loaded",
    "LibRmVersionMismatch": "the driver's library and kernel module differ in version; reboot or reload the module",
    "FunctionNotFound": "the driver is too old to tell",
    "ResetRequired": "the GPU needs a reset",
    "Unknown": "the driver reports an unknown error",
}


def reason(error: BaseException) -> str:
    """Return the message of an exception of NVML, DCGM or the system, as one line."""
    words = _NVML.get(type(error).__name__.removeprefix("NVMLError_"))
    if words:
        return words
    try:
        text = " ".join(str(error).split())
    except Exception:  # NVMLError reads its text from the driver, which can fail, too
        text = ""
    return text or type(error).__name__

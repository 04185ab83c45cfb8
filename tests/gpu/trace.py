"""Kernels and waits of one call, from a profiler trace. torch's sync debug mode does not see all waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tests.emulated_cuda.record import EMULATED, recorded

_REGION = "traced call"


@dataclass(frozen=True)
class Trace:
    kernels: list[str]
    waits: list[str]
    """Calls that wait for the device, and copies from it to the host."""


def traced(run: Callable[[], object]) -> Trace:
    if EMULATED:  # a profiler sees no emulated device
        record = recorded(run)
        waits = [call for call in record.calls if "Synchronize" in call]
        waits += [operation for operation in record.operations if operation == "copy to host"]
        return Trace([operation for operation in record.operations if operation.startswith("kernel ")], waits)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace, record_function(_REGION):
        run()
    events = trace.events()
    region = next(e for e in events if e.name == _REGION and e.device_type == DeviceType.CPU)
    annotations = {e.name for e in events if e.is_user_annotation}  # torch's ranges around optimizers, and this one
    on_device = [e.name for e in events if e.device_type == DeviceType.CUDA and e.name not in annotations]
    # The profiler itself waits for the device after the region.
    inside = [e.name for e in events if region.time_range.start <= e.time_range.start <= region.time_range.end]
    waits = [name for name in inside if "Synchronize" in name] + [name for name in on_device if "DtoH" in name]
    return Trace([name for name in on_device if not name.startswith(("Memcpy", "Memset"))], waits)

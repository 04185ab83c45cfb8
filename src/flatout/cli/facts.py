"""Readers of facts about the machine and the install, for the rules of ``flatout doctor``."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import platform
import re
import resource
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flatout import native
from flatout.core import machine
from flatout.mfu.peaks import gpu_of
from flatout.monitor.nvml import throttle_words

GIB = 2**30
_GOVERNORS = Path("/sys/devices/system/cpu")
DRIVER = Path("/proc/driver/nvidia/version")
NODES = Path("/sys/devices/system/node")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Facts(SimpleNamespace):
    """Facts by name. A fact that was not read is None."""

    def __getattr__(self, name: str) -> None:
        return None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def compilers() -> list[Facts]:
    """Return each tool that ``torch.compile`` lacks, or all its tools if no tool is missing."""
    compiler = next(filter(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    triton = importlib.util.find_spec("triton") is not None
    has = {"C++ compiler": compiler, "Python.h": header.exists(), "Triton": triton or not torch.cuda.is_available()}
    missing = [Facts(missing=tool) for tool, found in has.items() if not found]
    return missing or [Facts(tools=f"{compiler}, Triton" if triton else compiler)]


def driver() -> Iterator[Facts]:
    """Yield the driver's version, or the reason why torch cannot use a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        version = re.search(r" (\d{3}\.[\d.]+) ", machine.text_of(DRIVER))
        yield Facts(version=version and version[1])
    elif not torch.version.cuda or not DRIVER.exists():
        yield Facts(has_none=True)
    elif visible is not None and visible.strip() in ("", "-1"):
        yield Facts(visible=visible)
    else:
        try:
            torch.cuda.init()
            error = "no device is visible (CUDA_VISIBLE_DEVICES?)"
        except Exception as raised:
            error = first_line(raised)
        yield Facts(error=error, cuda=torch.version.cuda)


def gpus() -> Iterator[Facts]:
    """Yield the facts of each GPU that torch can use."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            properties = torch.cuda.get_device_properties(index)
        except Exception as error:
            yield Facts(gpu=f"cuda:{index}", error=first_line(error))
        else:
            board = _nvml(f"GPU-{getattr(properties, 'uuid', '')}")
            yield Facts(gpu=f"cuda:{index}", **_gpu(index, properties), **board)


def _gpu(index: int, properties: Any) -> dict[str, Any]:
    built_for, major, minor = torch.cuda.get_arch_list(), properties.major, properties.minor
    old_driver = native.old_driver()
    return {
        "model": f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, sm_{major}{minor}",
        "architecture": f"sm_{major}{minor}",
        "before_ampere": major < 8,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "built_for": ", ".join(built_for),
        "cannot_run_torch": not _runs_code(built_for, major, minor),
        "cannot_run_kernels": native.BUILT_WITH_CUDA and bool(old_driver or not native.has_cuda_kernels(index)),
        "old_driver": old_driver,
        "without_data_sheet": gpu_of(properties.name.partition(" MIG ")[0]) is None,
    }


def _runs_code(built_for: list[str], major: int, minor: int) -> bool:
    """Return True if a GPU runs code that was built for any of the architectures.

    Machine code (``sm_``) runs on its own and on later minor versions of its major version. PTX (``compute_``) runs on
    its own and on all later versions.
    """
    codes = filter(None, (re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in built_for))
    return not built_for or any(
        (int(code[2]), int(code[3])) <= (major, minor) and (code[1] == "compute" or int(code[2]) == major)
        for code in codes
    )


_USUAL_CLOCK_EVENTS = {"idle", "power limit", "sync boost"}
"""Clock events of a healthy GPU. Every GPU under load reaches its power limit."""

_NVML_QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    # fact: query of (nvml, handle)
    "lanes": lambda nvml, gpu: (nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
    "persistence": lambda nvml, gpu: nvml.nvmlDeviceGetPersistenceMode(gpu),
    "memory_errors": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
    "slowdowns": lambda nvml, gpu: ", ".join(
        sorted(set(throttle_words(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))) - _USUAL_CLOCK_EVENTS)
    ),
}


def _nvml(uuid: str) -> dict[str, Any]:
    """Return NVML's facts of a GPU. Facts whose query fails are absent. A MIG device has no facts."""
    facts: dict[str, Any] = {}
    with suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
            for name, query in _NVML_QUERIES.items():
                with suppress(Exception):
                    facts[name] = query(nvml, gpu)
        finally:
            nvml.nvmlShutdown()
    return facts


def cudnn() -> Iterator[Facts]:
    """Yield cuDNN's version and flags, or the error of a cuDNN that torch was not built with."""
    flags = torch.backends.cudnn
    try:
        version = flags.version() if flags.is_available() else None
    except RuntimeError as error:
        yield Facts(error=first_line(error))
        return
    if version is not None:
        names = " and ".join(name for name in ("benchmark", "deterministic") if getattr(flags, name))
        found = _cudnn_version(version) + (f", {names} on" if names else "")
        yield Facts(version=found, enabled=flags.enabled, deterministic=flags.deterministic)
    elif torch.cuda.is_available():
        yield Facts(is_missing=True)


def _cudnn_version(number: int) -> str:
    """Return the dotted version. 92400 is 9.24.0. Before cuDNN 9, numbers have one digit less, so 8902 is 8.9.2."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def tf32() -> Iterator[Facts]:
    """Yield the precision of float32 products, on a GPU with TF32."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8:
        # The older flags also set this flag. After a user has set this flag, the older flags raise or mislead.
        yield Facts(precision=torch.backends.cuda.matmul.fp32_precision)


def cores() -> Iterator[Facts]:
    """Yield the usable cores, the process's limits on cores, torch's threads, and each rank's share of the cores."""
    visible = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else visible
    quota = min(map(machine.quota_of, machine.control_groups("cpu")), default=math.inf)
    limits = [f"affinity {allowed}"] if allowed < visible else []
    limits += [f"quota {quota:g}"] if quota < allowed else []
    yield Facts(
        cores=machine.usable_cores(),
        ranks=machine.local_ranks(),
        share=machine.own_cores(),
        visible=visible,
        limits=", ".join([*limits, platform.machine()]),
        threads=torch.get_num_threads(),
        variable=os.environ.get("OMP_NUM_THREADS"),
    )


def governors() -> Iterator[Facts]:
    """Yield the frequency governors of all CPUs; nothing on a virtual machine, which has no governors."""
    found = {file.read_text().strip() for file in _GOVERNORS.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    drivers = {machine.text_of(file) for file in _GOVERNORS.glob("cpu[0-9]*/cpufreq/scaling_driver")}
    if found:
        yield Facts(governors=", ".join(sorted(found)), drivers=drivers)


def open_files() -> Iterator[Facts]:
    """Yield the soft and hard limit of open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    yield Facts(soft=soft, hard="unlimited" if hard is None else hard)

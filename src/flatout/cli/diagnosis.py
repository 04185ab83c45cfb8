"""Checks of one machine for ``flatout doctor``: parts that flatout requires."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import flatout
from flatout import native
from flatout.core.formatting import first_line, size_of
from flatout.core.machine import free_shared_memory, text_of
from flatout.mfu.peaks import gpu_of

Verdict = Literal["good", "note", "slow", "broken"]
"""``slow``: costs speed. ``broken``: something does not work. ``note``: worth knowing."""

DRIVER = Path("/proc/driver/nvidia/version")
_SMALL_SHARED_MEMORY = 2**30
"""Bytes of /dev/shm below which the batches of a few workers may not fit."""

_REBUILD = "pip install --force-reinstall --no-deps . in flatout's source folder"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        topic: ``install``, ``GPU``, ``memory`` or ``ranks``; ``other`` if the check failed.
        name: the subject.
        found: the subject's state, in words.
        verdict: the judgment of the state.
        fix: the remedy, empty if there is none.
    """

    topic: str
    name: str
    found: str
    verdict: Verdict = "good"
    fix: str = ""


def examine() -> tuple[Finding, ...]:
    """Examine the machine and the install without changing anything."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:  # the machine may be of an unforeseen kind
            name = check.__name__.strip("_").replace("_", " ")
            findings.append(Finding("other", name, f"could not be checked: {first_line(error)}", "note"))
    return tuple(findings)


def _flatout() -> Iterator[Finding]:
    version = f"{flatout.__version__}, Python {platform.python_version()}"
    if native.BUILT_WITH_CUDA:
        yield Finding("install", "flatout", f"{version}, with kernels for CUDA {native.built_for_cuda()}")
    elif torch.version.cuda is None:
        yield Finding("install", "flatout", f"{version}, for the CPU")
    else:
        toolkit, nvcc = f"a CUDA {torch.version.cuda.partition('.')[0]} toolkit", _nvcc()
        fix = f"install {toolkit}, set CUDA_HOME to its folder, and run {_REBUILD}"
        if nvcc:
            fix = f"run {_REBUILD}, which requires nvcc of {toolkit} and finds {nvcc}"
        verdict: Verdict = "slow" if torch.cuda.is_available() else "note"
        yield Finding("install", "flatout", f"{version}, without CUDA kernels", verdict, fix)


def _nvcc() -> str | None:
    """Return the path of the nvcc that a build of flatout finds, or None."""
    homes = filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"))
    path = os.pathsep.join([*(f"{home}/bin" for home in homes), os.environ.get("PATH", "")])
    return os.environ.get("CUDACXX") or shutil.which("nvcc", path=path)


def _torch() -> Iterator[Finding]:
    if torch.version.cuda is None and torch.version.hip is None and DRIVER.exists():
        fix = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
        yield Finding("install", "torch", f"{torch.__version__} is for the CPU, on a machine with a GPU", "broken", fix)
    else:
        yield Finding("install", "torch", torch.__version__)


def _compilers() -> Iterator[Finding]:
    compiler = next(filter(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    triton = not torch.cuda.is_available() or importlib.util.find_spec("triton") is not None
    missing = [
        Finding("install", "torch.compile", f"requires {tool}, which is missing", "slow", fix)
        for tool, is_there, fix in (
            ("a C++ compiler", compiler is not None, "sudo apt install g++"),
            ("Python.h", header.exists(), "sudo apt install python3-dev"),
            ("Triton", triton, "pip install triton"),
        )
        if not is_there
    ]
    yield from missing or [Finding("install", "torch.compile", f"{compiler}")]


def _monitor() -> Iterator[Finding]:
    if torch.cuda.is_available() and importlib.util.find_spec("pynvml") is None:
        found = "verdicts lack utilization and throttling, because nvidia-ml-py is not installed"
        yield Finding("install", "NVML", found, "note", "pip install 'flatout[monitor]'")


def _driver() -> Iterator[Finding]:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        match, old = re.search(r" (\d{3}\.[\d.]+) ", text_of(DRIVER)), native.old_driver()
        version = match[1] if match else "unknown version"
        if old is None:
            yield Finding("GPU", "driver", version)
        else:
            found = f"{version} supports CUDA {old.supports}, but flatout's kernels require CUDA {old.built_with}"
            yield Finding("GPU", "driver", found, "slow", old.fix)
    elif torch.version.cuda is None or not DRIVER.exists():
        yield Finding("GPU", "device", "none: training runs on the CPU", "note")
    elif hidden is not None and hidden.strip() in ("", "-1"):
        found = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}: training runs on the CPU"
        yield Finding("GPU", "device", found, "note", "unset CUDA_VISIBLE_DEVICES")
    else:
        try:
            torch.cuda.init()
            error = "no device is visible (CUDA_VISIBLE_DEVICES?)"
        except Exception as raised:
            error = first_line(raised)
        fix = f"install a driver for CUDA {torch.version.cuda} or newer"
        yield Finding("GPU", "driver", f"torch cannot use the GPU: {error}", "broken", fix)


def _gpus() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        name = f"cuda:{index}"
        try:
            properties = torch.cuda.get_device_properties(index)
            run_kernel(index)
        except Exception as error:
            fix = "nvidia-smi -q shows the state of the GPU: it may need a reset, or a torch with its architecture"
            yield Finding("GPU", name, f"cannot be used: {first_line(error)}", "broken", fix)
            continue
        version = f"{properties.major}.{properties.minor}"
        model = f"{properties.name}, {size_of(properties.total_memory)}, compute capability {version}"
        yield Finding("GPU", name, model)
        if native.BUILT_WITH_CUDA and native.old_driver() is None and not native.has_cuda_kernels(index):
            found = "flatout's kernels are built for other GPUs: torch's own operations run"
            fix = f"build flatout for this GPU: TORCH_CUDA_ARCH_LIST={version} {_REBUILD}"
            yield Finding("GPU", f"{name} kernels", found, "slow", fix)
        if gpu_of(properties.name.partition(" MIG ")[0]) is None:
            found = "not in the table of data sheets: MFU requires a measured peak"
            yield Finding("GPU", f"{name} peak", found, "note", "flatout.mfu.measured_peak_flops() measures the peak")


def run_kernel(index: int) -> None:
    """Run one kernel of torch on a GPU."""
    (torch.ones(1, device=torch.device("cuda", index)) + 1).item()


def _shared_memory() -> Iterator[Finding]:
    free = free_shared_memory()
    if free < _SMALL_SHARED_MEMORY:
        fix = "docker run --shm-size=8g, or sudo mount -o remount,size=8g /dev/shm: loader workers send batches there"
        yield Finding("memory", "/dev/shm", f"{size_of(free)} free", "slow", fix)
    elif free < math.inf:
        yield Finding("memory", "/dev/shm", f"{size_of(free)} free")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _flatout,
    _torch,
    _compilers,
    _monitor,
    _driver,
    _gpus,
    _shared_memory,
)
"""Checks in the order of the page."""

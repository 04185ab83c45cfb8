"""Fake machine, given as data: its files, system calls, torch and NVML."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flatout import native
from flatout.cli import facts
from flatout.core import machine
from flatout.native import _host

GIB = 2**30
HEADER = "usr/include/python3/Python.h"
DRIVER = "proc/driver/nvidia/version"
FILES = {
    DRIVER: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
    "proc/self/cgroup": "0::/\n",
    "proc/meminfo": f"MemAvailable: {64 * 2**20} kB\nSwapTotal: {4 * 2**20} kB\nSwapFree: {4 * 2**20} kB\n",
    "sys/fs/cgroup/cpu.max": "max 100000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    HEADER: "",
}
"""Files that the doctor reads, on a machine without defects."""


@dataclass(frozen=True)
class Gpu:
    """GPU as torch reports it. If ``fails`` is set, torch raises it as the message of an error."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    runs_kernels: bool = True
    fails: str = ""

    def properties(self) -> SimpleNamespace:
        if self.fails:
            raise RuntimeError(self.fails)
        major, minor = self.capability
        return SimpleNamespace(name=self.name, total_memory=80 * GIB, major=major, minor=minor, uuid="8932f937")


class DoctorNvml:
    """Fake of nvidia-ml-py for one GPU. An answer of None raises "not supported".

    Attributes:
        answers: name of each query, without ``nvmlDeviceGet``, to its answer.
        open: number of ``nvmlInit`` calls minus number of ``nvmlShutdown`` calls.
        asked: names that the doctor used of the module.
    """

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, **answers: int | None) -> None:
        well = {"CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16, "PersistenceMode": 1, "TotalEccErrors": 0}
        self.answers = {**well, "CurrentClocksEventReasons": 0x5, **answers}
        self.open = 0
        self.asked = {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByUUID"}

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-8932f937"
        return "handle"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):  # names that the import system looks up
            raise AttributeError(name)
        self.asked.add(name)
        answer = self.answers[name.removeprefix("nvmlDeviceGet")]

        def ask(handle: str, *rest: int) -> int:
            if answer is None:
                raise RuntimeError("Not Supported")
            return answer

        return ask


@dataclass(frozen=True)
class Machine:
    """Machine and its installed software. The defaults describe a machine without defects.

    If a field holds an exception, reading the field on the fake machine raises the exception.

    Attributes:
        files: path below the root to content, added to ``FILES``. None removes a file.
        environment: all environment variables.
        gpus: GPUs that torch can use.
        no_gpu: message of the error that ``torch.cuda.init`` raises if torch can use no GPU.
        torch_cuda: CUDA version of torch's build, None for a CPU build.
        torch_code: architectures of torch's build.
        built_with_kernels: True if flatout was built with CUDA kernels.
        cuda_versions: CUDA versions of the driver and of flatout's runtime, in the format of ``_host.cuda_versions``.
        nvml: module that ``import pynvml`` returns, None if pynvml is not installed.
        cudnn: version number, None without cuDNN.
        commands: programs on the PATH.
        modules: modules that Python can import.
        cpus: number of logical CPUs, and number of CPUs that this process may use.
        threads: number of torch's threads.
        load: load average of the last minute.
        shared_memory: free bytes in /dev/shm, None without /dev/shm.
        open_files: soft and hard limit of open files.
        traced: True if a debugger is attached.
    """

    files: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] | Exception = (Gpu(),)
    no_gpu: str = "No CUDA GPUs are available"
    torch_cuda: str | None = "13.0"
    torch_code: tuple[str, ...] = ("sm_75", "sm_80", "sm_90")
    built_with_kernels: bool = True
    cuda_versions: tuple[int, int] = (13000, 13000)
    nvml: DoctorNvml | None = None
    cudnn: int | Exception | None = 92400
    commands: tuple[str, ...] = ("g++", "nsys", "ncu")
    modules: tuple[str, ...] = ("psutil", "pynvml", "triton")
    cpus: tuple[int, int] = (8, 8)
    threads: int = 8
    load: float | Exception = 0.1
    shared_memory: int | None = 32 * GIB
    open_files: tuple[int, int] = (524288, 524288)
    traced: bool = False

    def with_files(self, **files: str | None) -> Machine:
        """Return a copy with other contents of some ``FILES``, given by their file names."""
        paths = {Path(path).name: path for path in FILES}
        return replace(self, files={**self.files, **{paths[name]: text for name, text in files.items()}})


WITHOUT_GPU = Machine(files={DRIVER: None}, gpus=(), torch_cuda=None, built_with_kernels=False, cudnn=None)
"""Machine without a GPU. torch and flatout are CPU builds."""

UNLIMITED = resource.RLIM_INFINITY


def raise_or_return(value: Any) -> Any:
    """Return the value of a field, or raise it if it is an exception."""
    if isinstance(value, Exception):
        raise value
    return value


def put_files(root: Path, files: Mapping[str, str | None]) -> None:
    for path, text in files.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)


def move_paths(patch: pytest.MonkeyPatch, module: ModuleType, root: Path) -> None:
    """Move each absolute path that is a global of the module below ``root``."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Path) and value.is_absolute():
            patch.setattr(module, name, root / value.relative_to("/"))


@contextlib.contextmanager
def on(fake: Machine, root: Path) -> Iterator[None]:
    """Run the block on a fake machine, with its files in ``root``."""
    put_files(root, {**FILES, **fake.files})
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, fake.environment, clear=True):
        for module in (facts, machine):
            move_paths(patch, module, root)
        put = patch.setattr
        patch.setitem(sys.modules, "pynvml", fake.nvml)  # type: ignore[arg-type]
        put(shutil, "which", lambda tool: tool if tool in fake.commands else None)
        put(importlib.util, "find_spec", lambda name: name if name in fake.modules else None)
        put(sysconfig, "get_path", lambda name: str((root / HEADER).parent))
        put(sys, "gettrace", lambda: print if fake.traced else None)
        put(os, "cpu_count", lambda: fake.cpus[0])
        put(os, "sched_getaffinity", lambda pid: set(range(fake.cpus[1])))
        put(os, "getloadavg", lambda: (raise_or_return(fake.load), 9.0, 9.0))
        put(os, "statvfs", lambda path: free_space(fake.shared_memory))
        put(resource, "getrlimit", lambda which: fake.open_files)
        put(torch, "get_num_threads", lambda: fake.threads)
        put(torch.version, "cuda", fake.torch_cuda)
        put(torch.version, "hip", None)
        put(torch.backends.cudnn, "version", lambda: raise_or_return(fake.cudnn))
        put(torch.backends.cudnn, "is_available", lambda: fake.cudnn is not None)
        put(torch.cuda, "is_available", lambda: fake.gpus != ())
        put(torch.cuda, "init", lambda: raise_or_return(RuntimeError(fake.no_gpu)))
        put(torch.cuda, "device_count", lambda: len(raise_or_return(fake.gpus)))
        put(torch.cuda, "get_device_properties", lambda index: raise_or_return(fake.gpus)[index].properties())
        put(torch.cuda, "get_device_capability", lambda: raise_or_return(fake.gpus)[0].capability)
        put(torch.cuda, "get_arch_list", lambda: list(fake.torch_code))
        put(native, "BUILT_WITH_CUDA", fake.built_with_kernels)
        put(_host, "cuda_versions", lambda: fake.cuda_versions)
        put(native, "has_cuda_kernels", lambda index: raise_or_return(fake.gpus)[index].runs_kernels)
        yield


def free_space(free: int | None) -> SimpleNamespace:
    if free is None:
        raise FileNotFoundError("/dev/shm")
    return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)

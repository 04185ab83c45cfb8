"""Fake machine, given as data: its files, system calls and torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import collect_env

from flatout import native
from flatout.cli import diagnosis
from flatout.core import machine
from flatout.native import _host

GIB = 2**30
HEADER = "usr/include/python3/Python.h"
DRIVER = "proc/driver/nvidia/version"
FILES = {
    DRIVER: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
    HEADER: "",
}
"""Files that the doctor reads, on a machine without defects."""

COLLECTED = collect_env.SystemEnv(*["known"] * len(collect_env.SystemEnv._fields))
"""Environment with the same text in each field."""


@dataclass(frozen=True)
class Gpu:
    """GPU as torch reports it. If ``fails`` is set, kernels raise it as the message of an error."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    runs_kernels: bool = True
    fails: str = ""

    def properties(self) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(name=self.name, total_memory=80 * GIB, major=major, minor=minor)

    def run_kernel(self) -> None:
        if self.fails:
            raise RuntimeError(self.fails)


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
        built_with_kernels: True if flatout was built with CUDA kernels.
        cuda_versions: CUDA versions of the driver and of flatout's runtime, in the format of ``_host.cuda_versions``.
        commands: programs on the PATH.
        modules: modules that Python can import.
        shared_memory: free bytes in /dev/shm, None without /dev/shm.
        environment_of_torch: result of ``collect_env.get_env_info``.
    """

    files: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] | Exception = (Gpu(),)
    no_gpu: str = "No CUDA GPUs are available"
    torch_cuda: str | None = "13.0"
    built_with_kernels: bool = True
    cuda_versions: tuple[int, int] = (13000, 13000)
    commands: tuple[str, ...] = ("g++",)
    modules: tuple[str, ...] = ("pynvml", "triton")
    shared_memory: int | Exception | None = 32 * GIB
    environment_of_torch: Any = COLLECTED


WITHOUT_GPU = Machine(files={DRIVER: None}, gpus=(), torch_cuda=None, built_with_kernels=False)
"""Machine without a GPU. torch and flatout are CPU builds."""


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
        for module in (diagnosis, machine):
            move_paths(patch, module, root)
        put = patch.setattr
        put(shutil, "which", lambda tool, path=None: tool if tool in fake.commands else None)
        put(importlib.util, "find_spec", lambda name: name if name in fake.modules else None)
        put(sysconfig, "get_path", lambda name: str((root / HEADER).parent))
        put(os, "statvfs", lambda path: free_space(raise_or_return(fake.shared_memory)))
        put(torch.version, "cuda", fake.torch_cuda)
        put(torch.version, "hip", None)
        put(torch.cuda, "is_available", lambda: fake.gpus != ())
        put(torch.cuda, "init", lambda: raise_or_return(RuntimeError(fake.no_gpu)))
        put(torch.cuda, "device_count", lambda: len(raise_or_return(fake.gpus)))
        put(torch.cuda, "get_device_properties", lambda index: raise_or_return(fake.gpus)[index].properties())
        put(diagnosis, "run_kernel", lambda index: raise_or_return(fake.gpus)[index].run_kernel())
        put(native, "BUILT_WITH_CUDA", fake.built_with_kernels)
        put(_host, "cuda_versions", lambda: fake.cuda_versions)
        put(native, "has_cuda_kernels", lambda index: raise_or_return(fake.gpus)[index].runs_kernels)
        put(collect_env, "get_env_info", lambda: raise_or_return(fake.environment_of_torch))
        yield


def free_space(free: int | None) -> SimpleNamespace:
    if free is None:
        raise FileNotFoundError("/dev/shm")
    return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)

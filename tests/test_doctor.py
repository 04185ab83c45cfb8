"""What the doctor finds where something is wrong, and how the page shows it."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import resource
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flatout import _native, doctor
from flatout.cli import main
from flatout.cli.doctor import show
from flatout.data import machine
from flatout.doctor import Finding


def the(findings) -> Finding:
    (finding,) = findings
    return finding


def test_this_machine_is_examined_and_nothing_is_changed():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    findings = doctor.examine()
    assert {finding.topic for finding in findings} >= {"install", "GPU", "CPU", "memory"}
    assert all(finding.name and finding.found for finding in findings)
    assert all(finding.fix for finding in findings if finding.verdict in ("slow", "broken"))
    assert (threads, precision) == (torch.get_num_threads(), torch.get_float32_matmul_precision())


def test_every_check_is_made():
    checks = {check for name, check in vars(doctor).items() if name.startswith("check_")}
    assert checks == set(doctor.CHECKS)


def test_a_build_without_kernels(monkeypatch):
    monkeypatch.setattr(_native, "BUILT_WITH_CUDA", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = the(doctor.check_flatout())
    assert found.verdict == "slow"
    assert "CUDA 13.0 toolkit" in found.fix
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert the(doctor.check_flatout()).verdict == "note"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert the(doctor.check_flatout()).verdict == "good"


def test_a_cpu_build_of_torch_beside_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    assert the(doctor.check_torch()).verdict == "good"
    (tmp_path / "version").touch()
    assert the(doctor.check_torch()).verdict == "broken"
    assert the(doctor.check_gpus()).found == "none: training runs on the CPU"


def test_a_driver_that_torch_cannot_use(monkeypatch, tmp_path):
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    found = the(doctor.check_gpus())
    assert found.verdict == "broken"
    assert found.found.endswith("too old (found version 11040).")
    assert "CUDA 13.0 or newer" in found.fix


def test_gpus_that_are_hidden_need_no_driver(monkeypatch, tmp_path):
    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = the(doctor.check_gpus())
    assert (found.verdict, found.fix) == ("note", "unset CUDA_VISIBLE_DEVICES")


def test_a_check_that_fails_is_a_line_and_the_others_are_made(monkeypatch):
    def check_the_moon():
        yield Finding("install", "moon", "there")
        raise OSError("no moon\nat all")

    monkeypatch.setattr(doctor, "CHECKS", (check_the_moon, doctor.check_load))
    findings = doctor.examine()
    assert [finding.name for finding in findings] == ["moon", "the moon", "load"]
    assert findings[1].found == "could not be looked at: no moon"


class Properties:
    def __init__(self, name: str, major: int, minor: int) -> None:
        self.name, self.major, self.minor = name, major, minor
        self.total_memory = 80 * 2**30
        self.multi_processor_count = 132
        self.uuid = "8932f937"


@pytest.mark.parametrize(
    ("properties", "runs", "wanted"),
    [
        (Properties("NVIDIA H100 80GB HBM3", 9, 0), True, [("cuda:0", "good")]),
        (Properties("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9, 0), True, [("cuda:0", "good")]),
        (Properties("Tesla T4", 7, 5), True, [("cuda:0", "note")]),
        (Properties("NVIDIA H100 PCIe", 9, 0), False, [("cuda:0", "good"), ("cuda:0 kernels", "slow")]),
        (Properties("NVIDIA A40", 8, 6), True, [("cuda:0", "good"), ("cuda:0 peak", "note")]),
    ],
)
def test_gpus(monkeypatch, tmp_path, properties, runs, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(_native, "BUILT_WITH_CUDA", True)
    monkeypatch.setattr(_native, "has_cuda_kernels", lambda _: runs)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    assert [(finding.name, finding.verdict) for finding in doctor.check_gpus()] == wanted


@pytest.fixture
def one_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties("NVIDIA H100 80GB HBM3", 9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr(_native, "has_cuda_kernels", lambda _: True)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (a@b)",
    ],
)
def test_the_drivers_version(one_gpu, text):
    doctor._DRIVER.write_text(text)
    assert next(finding.found for finding in doctor.check_gpus()) == "535.104.05"


def test_a_gpu_that_fails_when_it_is_asked(one_gpu, monkeypatch):
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: devices unavailable\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    found = the(doctor.check_gpus())
    assert (found.verdict, found.found) == ("broken", "cannot be used: CUDA error: devices unavailable")


@pytest.mark.parametrize(
    ("built_for", "major", "minor", "runs"),
    [
        (["sm_80", "sm_90"], 9, 0, True),
        (["sm_80"], 8, 6, True),
        (["sm_86"], 8, 0, False),
        (["sm_75", "sm_80"], 7, 0, False),
        (["sm_80", "sm_90"], 12, 0, False),
        (["sm_80", "compute_80"], 12, 0, True),
        (["sm_90a", "sm_100"], 10, 3, True),
        (["gfx90a"], 9, 0, False),
        ([], 9, 0, True),
    ],
)
def test_architectures(built_for, major, minor, runs):
    assert doctor._has_kernels(built_for, major, minor) == runs


def test_a_torch_without_code_for_the_gpu(one_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100", "sm_120"])
    found = [finding for finding in doctor.check_gpus() if finding.verdict == "broken"]
    assert the(found).found.endswith("is built for sm_100, sm_120")
    assert "sm_90" in the(found).fix


class Board:
    """Some of nvidia-ml-py, with what it answers of one GPU."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, **answers):
        well = {"CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16, "PersistenceMode": 1, "TotalEccErrors": 0}
        self.answers = {**well, "CurrentClocksEventReasons": 0x5, **answers}
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-8932f937"
        return "handle"

    def __getattr__(self, name):
        if not name.startswith("nvmlDeviceGet"):  # what the import looks at
            raise AttributeError(name)
        answer = self.answers[name.removeprefix("nvmlDeviceGet")]

        def ask(handle, *rest):
            if answer is None:
                raise RuntimeError("Not Supported")
            return answer

        return ask


@pytest.mark.parametrize(
    ("answers", "name", "verdict"),
    [
        ({}, None, None),
        ({"CurrPcieLinkWidth": 8}, "cuda:0 PCIe", "slow"),
        ({"PersistenceMode": 0}, "cuda:0 start", "note"),
        ({"TotalEccErrors": 2}, "cuda:0 memory", "broken"),
        ({"TotalEccErrors": None, "CurrentClocksEventReasons": 0x40}, "cuda:0 clocks", "slow"),
    ],
)
def test_what_the_driver_tells_of_a_gpu(one_gpu, monkeypatch, answers, name, verdict):
    board = Board(**answers)
    monkeypatch.setitem(sys.modules, "pynvml", board)
    told = [(found.name, found.verdict) for found in doctor.check_gpus()]
    assert told == [("cuda:0", "good"), *([(name, verdict)] if name else [])]
    assert board.open == 0


def test_every_name_that_is_asked_of_nvml_is_in_the_real_module():
    real = pytest.importorskip("pynvml")
    names = {node.attr for node in ast.walk(ast.parse(Path(doctor.__file__).read_text())) if hasattr(node, "attr")}
    used = {name for name in names if name.startswith(("nvml", "NVML"))}
    assert len(used) == 10
    assert not [name for name in used if not hasattr(real, name)]
    assert (real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, real.NVML_VOLATILE_ECC) == (1, 0)


def test_another_cudnn_than_torchs_own(monkeypatch):
    def fail() -> int:
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 24, 0)\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", fail)
    found = the(doctor.check_cudnn())
    assert found.verdict == "broken"
    assert "LD_LIBRARY_PATH" in found.fix
    assert "\n" not in found.found


def test_what_torch_compile_builds_with(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda tool: tool if tool == "g++" else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "Python.h").touch()
    assert the(doctor.check_compiler()).found == "g++"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert the(doctor.check_compiler()).fix == "pip install triton"
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    (tmp_path / "Python.h").unlink()
    assert [found.found[:9] for found in doctor.check_compiler()] == ["no C++ co", "no Python", "no Triton"]


@pytest.mark.parametrize(("number", "said"), [(92400, "9.24.0"), (90100, "9.1.0"), (8902, "8.9.2")])
def test_cudnn_versions(number, said):
    assert doctor._cudnn_version(number) == said


@pytest.mark.parametrize(
    ("flag", "value", "verdict"),
    [("enabled", False, "slow"), ("deterministic", True, "note"), ("benchmark", True, "good")],
)
def test_cudnn_flags(monkeypatch, flag, value, verdict):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    with torch.backends.cudnn.flags(**({"enabled": True} | {flag: value})):
        assert the(doctor.check_cudnn()).verdict == verdict


@pytest.fixture
def flags():
    """The flags of TF32, given back after the test."""
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


def by_new_flag(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


@pytest.mark.parametrize(
    ("put", "precision", "verdict"),
    [
        (torch.set_float32_matmul_precision, "highest", "slow"),
        (torch.set_float32_matmul_precision, "high", "good"),
        (torch.set_float32_matmul_precision, "medium", "good"),
        (by_new_flag, "tf32", "good"),  # torch's older question raises from here on
        (by_new_flag, "ieee", "slow"),
        (by_new_flag, "none", "slow"),
    ],
)
def test_tf32(monkeypatch, flags, put, precision, verdict):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    put(precision)
    assert the(doctor.check_tf32()).verdict == verdict
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert list(doctor.check_tf32()) == []


def test_cores_and_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(machine, "control_groups", lambda _: iter([tmp_path]))
    (tmp_path / "cpu.max").write_text("150000 100000")
    cores, threads = doctor.check_cores()
    assert cores.found.startswith("2 usable of 64 logical (affinity 8, quota 1.5, ")
    assert threads.verdict == "slow"
    assert "OMP_NUM_THREADS=2" in threads.fix
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [found.verdict for found in doctor.check_cores()] == ["good", "good"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [found.verdict for found in doctor.check_cores()] == ["good", "note"]


def test_load(monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    assert the(doctor.check_load()).verdict == "note"
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 9.0, 9.0))
    assert the(doctor.check_load()).verdict == "good"


@pytest.mark.parametrize(
    ("governors", "verdict"),
    [(["performance"] * 2, "good"), (["powersave", "performance"], "slow"), (["schedutil"] * 2, "note")],
)
def test_governor(monkeypatch, tmp_path, governors, verdict):
    monkeypatch.setattr(doctor, "_GOVERNORS", tmp_path)
    assert list(doctor.check_governor()) == []
    for cpu, governor in enumerate(governors):
        (tmp_path / f"cpu{cpu}" / "cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "cpufreq" / "scaling_governor").write_text(governor + "\n")
    assert the(doctor.check_governor()).verdict == verdict
    (tmp_path / "cpu0" / "cpufreq" / "scaling_driver").write_text("intel_pstate\n")  # its powersave follows the work
    assert the(doctor.check_governor()).verdict == ("note" if verdict == "slow" else verdict)


def test_numa_swap_and_huge_pages(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_NODES", tmp_path)
    monkeypatch.setattr(doctor, "_HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(machine, "swap", lambda: (2**27, 2**32))
    (tmp_path / "node0").mkdir()
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert [*doctor.check_numa(), *doctor.check_huge_pages(), *doctor.check_swap()] == []
    (tmp_path / "node1").mkdir()
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(machine, "swap", lambda: (2**30, 2**32))
    assert the(doctor.check_numa()).found == "2 nodes"
    assert the(doctor.check_huge_pages()).verdict == "note"
    assert the(doctor.check_swap()).found == "1.0 of 4.0 GiB in use"


def test_swap_is_read(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("SwapTotal:  4 kB\nSwapFree:   1 kB\n")
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert machine.swap() == (3072, 4096)


def test_memory_and_limits(monkeypatch):
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**30)
    assert the(doctor.check_memory()).verdict == "slow"
    monkeypatch.setattr(doctor, "free_shared_memory", lambda: 64 * 2**20)
    assert "--shm-size" in the(doctor.check_shared_memory()).fix
    monkeypatch.setattr(doctor, "free_shared_memory", lambda: float("inf"))
    assert list(doctor.check_shared_memory()) == []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert "ulimit -n unlimited" in the(doctor.check_files()).fix
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 524288))
    assert "ulimit -n 524288:" in the(doctor.check_files()).fix  # without a comma: it can be pasted
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert the(doctor.check_files()).verdict == "good"


def test_settings_left_on(monkeypatch):
    for variable in doctor._SLOW_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert list(doctor.check_environment()) == []
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    found = the(doctor.check_environment())
    assert (found.verdict, found.fix) == ("slow", "unset CUDA_LAUNCH_BLOCKING")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")  # that it is set is enough
    monkeypatch.setenv("PYTHONDEVMODE", "")
    assert [found.fix for found in doctor.check_environment()][1:] == ["unset PYTORCH_NO_CUDA_MEMORY_CACHING"]
    assert list(doctor.check_anomaly_mode()) == []
    with torch.autograd.set_detect_anomaly(True):
        assert the(doctor.check_anomaly_mode()).verdict == "slow"


def test_allocator_and_tracing(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert the(doctor.check_allocator()).found == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    assert list(doctor.check_tracing()) == []
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert the(doctor.check_tracing()).verdict == "slow"


FINDINGS = (
    Finding("install", "torch", "2.14.1, on a machine with an NVIDIA GPU", "broken", "install a build for CUDA"),
    Finding("install", "flatout", "0.1.0"),
    Finding("CPU", "governor", "powersave", "slow", "sudo cpupower frequency-set -g performance"),
    Finding("memory", "open files", "1,024", "note", "ulimit -n 524288: every tensor holds a descriptor"),
)


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_page_tells_everything_at_every_width(width, encoding):
    sink = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(FINDINGS, Console(file=sink, width=width, color_system=None, highlight=False))
    sink.seek(0)
    text = sink.read()
    assert max(map(len, text.splitlines())) <= width
    squeezed = "".join(text.split())
    for finding in FINDINGS:
        assert finding.name.replace(" ", "") in squeezed
        assert finding.topic in squeezed
    assert "1broken,1slow,1worthknowing,1good" in squeezed
    if width >= 80:
        assert all(finding.found in text and finding.fix in text for finding in FINDINGS)


def test_command(monkeypatch, capsys):
    monkeypatch.setattr("flatout.cli.doctor.examine", lambda: FINDINGS)
    assert main(["doctor"]) == 1
    assert "cpupower" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == doctor.as_dicts(FINDINGS)
    monkeypatch.setattr("flatout.cli.doctor.examine", lambda: FINDINGS[1:])
    assert main(["doctor"]) == 0

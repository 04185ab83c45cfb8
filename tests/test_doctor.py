"""What the doctor finds where something is wrong, and how the page shows it."""

from __future__ import annotations

import io
import json
import os
import resource

import pytest
import torch
from rich.console import Console

from flatout import _native, doctor
from flatout.cli import main
from flatout.cli.doctor import show
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


class Properties:
    def __init__(self, name: str, major: int, minor: int) -> None:
        self.name, self.major, self.minor = name, major, minor
        self.total_memory = 80 * 2**30
        self.multi_processor_count = 132


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
def test_gpus(monkeypatch, properties, runs, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(_native, "BUILT_WITH_CUDA", True)
    monkeypatch.setattr(_native, "has_cuda_kernels", lambda _: runs)
    assert [(finding.name, finding.verdict) for finding in doctor.check_gpus()] == wanted


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


@pytest.mark.parametrize(("precision", "verdict"), [("highest", "slow"), ("high", "good"), ("medium", "good")])
def test_tf32(monkeypatch, precision, verdict):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert the(doctor.check_tf32()).verdict == verdict
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert list(doctor.check_tf32()) == []


def test_cores_and_threads(monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    cores, threads = doctor.check_cores()
    assert cores.found.startswith("2 usable of 64 logical")
    assert threads.verdict == "slow"
    assert "OMP_NUM_THREADS=2" in threads.fix


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


def test_memory_and_limits(monkeypatch):
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**30)
    assert the(doctor.check_memory()).verdict == "slow"
    monkeypatch.setattr(doctor, "free_shared_memory", lambda: 64 * 2**20)
    assert "--shm-size" in the(doctor.check_shared_memory()).fix
    monkeypatch.setattr(doctor, "free_shared_memory", lambda: float("inf"))
    assert list(doctor.check_shared_memory()) == []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert "ulimit -n unlimited" in the(doctor.check_files()).fix
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
    assert list(doctor.check_anomaly_mode()) == []
    with torch.autograd.set_detect_anomaly(True):
        assert the(doctor.check_anomaly_mode()).verdict == "slow"


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

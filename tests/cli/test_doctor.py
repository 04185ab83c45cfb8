"""Findings of the doctor for each defect, and the page that shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from flatout.cli import diagnosis, main
from flatout.cli.diagnosis import Finding
from flatout.cli.doctor import show
from tests.fake_machine import DRIVER, GIB, HEADER, UNLIMITED, WITHOUT_GPU, DoctorNvml, Gpu, Machine, on
from tests.reasons import finding_code
from tests.renderings.rendered import drawn
from tests.renderings.samples import FINDINGS

Examine = Callable[[Machine], tuple[Finding, ...]]


@pytest.fixture
def examine(tmp_path_factory: pytest.TempPathFactory) -> Examine:
    """Return the function that examines a fake machine, with torch's flags as recommended for a GPU."""
    torch.set_float32_matmul_precision("high")

    def look(machine: Machine) -> tuple[Finding, ...]:
        with on(machine, tmp_path_factory.mktemp("machine")):
            return diagnosis.examine()

    return look


def wrong(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    """Return code and verdict of each finding with a verdict other than good."""
    return [(finding_code(finding), finding.verdict) for finding in findings if finding.verdict != "good"]


def named(findings: tuple[Finding, ...], name: str) -> Finding:
    (finding,) = (finding for finding in findings if finding.name == name)
    return finding


def test_this_machine_is_examined_and_nothing_is_changed() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    findings = diagnosis.examine()
    assert {finding.topic for finding in findings} >= {"install", "GPU", "CPU", "memory"}
    assert all(finding.name and finding.found for finding in findings)
    assert all(finding.fix for finding in findings if finding.verdict in ("slow", "broken"))
    assert (threads, precision) == (torch.get_num_threads(), torch.get_float32_matmul_precision())


def test_nothing_is_wrong_with_a_good_machine(examine: Examine) -> None:
    findings = examine(nvml())
    assert wrong(findings) == []
    assert {finding.name for finding in findings} == {
        *("flatout", "torch", "extras", "torch.compile", "profilers"),
        *("driver", "cuda:0", "cuDNN", "TF32"),
        *("cores", "threads", "load", "governor"),
        *("RAM", "/dev/shm", "open files"),
    }
    assert not any(finding.fix for finding in findings)


GOOD = Machine()


def cpu_files(kind: str, *texts: str) -> dict[str, str | None]:
    return {f"sys/devices/system/cpu/cpu{cpu}/cpufreq/{kind}": text + "\n" for cpu, text in enumerate(texts)}


def environment(**variables: str) -> Machine:
    return replace(GOOD, environment=variables)


def gpu(**changes: object) -> Machine:
    return replace(GOOD, gpus=(replace(Gpu(), **changes),))  # type: ignore[arg-type]


def nvml(**answers: int | None) -> Machine:
    return replace(GOOD, nvml=DoctorNvml(**answers))


WRONG = {
    # defect: (machine, findings with a verdict other than good, substrings of their fixes)
    "no kernels in a build for a GPU": (
        replace(GOOD, built_with_kernels=False),
        [("kernels-missing", "slow")],
        ["CUDA 13.0"],
    ),
    "no kernels in a build for CUDA, and no GPU": (
        replace(WITHOUT_GPU, torch_cuda="13.0"),
        [("kernels-missing", "note"), ("no-gpu", "note")],
        ["CUDA 13.0"],
    ),
    "no GPU": (WITHOUT_GPU, [("no-gpu", "note")], []),
    "torch for the CPU beside a GPU": (
        replace(WITHOUT_GPU, files={}),
        [("cpu-build", "broken"), ("no-gpu", "note")],
        ["https://pytorch.org"],
    ),
    "a driver that is too old": (
        replace(GOOD, gpus=(), cudnn=None, no_gpu="The driver is too old (found version 11040).\nMore."),
        [("driver-unusable", "broken")],
        ["CUDA 13.0"],
    ),
    "hidden GPUs": (
        replace(GOOD, gpus=(), cudnn=None, environment={"CUDA_VISIBLE_DEVICES": ""}),
        [("gpu-hidden", "note")],
        ["unset CUDA_VISIBLE_DEVICES"],
    ),
    "no extras": (
        replace(GOOD, modules=("triton",)),
        [("extras-missing", "note")],
        ["pip install 'flatout[monitor]'"],
    ),
    "no compiler": (replace(GOOD, commands=("ncu",)), [("no-compiler", "slow")], ["g++"]),
    "no headers of Python": (replace(GOOD, files={HEADER: None}), [("no-python-headers", "slow")], ["python3-dev"]),
    "no Triton": (replace(GOOD, modules=("psutil", "pynvml")), [("no-triton", "slow")], ["pip install triton"]),
    "no Triton, and no GPU for it": (replace(WITHOUT_GPU, modules=("psutil", "pynvml")), [("no-gpu", "note")], []),
    "nothing to compile with": (
        replace(GOOD, commands=("nsys",), files={HEADER: None}, modules=("psutil", "pynvml")),
        [("no-compiler", "slow"), ("no-python-headers", "slow"), ("no-triton", "slow")],
        [],
    ),
    "no profilers": (replace(GOOD, commands=("clang++",)), [("no-profilers", "note")], []),
    "a slice of a GPU": (gpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"), [], []),
    "a GPU before Ampere": (gpu(name="Tesla T4", capability=(7, 5)), [("no-bfloat16", "note")], []),
    "a GPU that flatout's kernels do not run on": (
        gpu(name="NVIDIA H100 PCIe", runs_kernels=False),
        [("kernels-for-other-gpus", "slow")],
        ["sm_90"],
    ),
    "a driver that serves torch, and not flatout's kernels": (
        replace(gpu(runs_kernels=False), torch_cuda="12.6", cuda_versions=(12040, 13000)),
        [("driver-too-old", "slow")],
        ["CUDA 13.0", "CUDA 12 toolkit"],
    ),
    "a GPU that no table knows": (gpu(name="NVIDIA A16", capability=(8, 6)), [("peak-unknown", "note")], []),
    "a GPU that fails": (
        gpu(fails="CUDA error: devices unavailable\nCUDA kernel errors might be"),
        [("gpu-unusable", "broken")],
        ["nvidia-smi"],
    ),
    "a torch for later GPUs": (
        replace(GOOD, torch_code=("sm_100", "sm_120")),
        [("torch-lacks-architecture", "broken")],
        ["sm_90"],
    ),
    "a narrow slot": (nvml(CurrPcieLinkWidth=8), [("pcie-lanes", "slow")], []),
    "a driver that comes and goes": (nvml(PersistenceMode=0), [("persistence-off", "note")], ["nvidia-smi -pm 1"]),
    "memory errors": (nvml(TotalEccErrors=2), [("memory-errors", "broken")], ["nvidia-smi --gpu-reset"]),
    "heat": (nvml(TotalEccErrors=None, CurrentClocksEventReasons=0x40), [("clocks-held-down", "slow")], []),
    "another cuDNN than torch's own": (
        replace(GOOD, cudnn=RuntimeError("PyTorch was compiled against (9, 24, 0)\nmore")),
        [("cudnn-mismatch", "broken")],
        ["unset LD_LIBRARY_PATH"],
    ),
    "no cuDNN": (replace(GOOD, cudnn=None), [("cudnn-missing", "slow")], []),
    "more threads than a quota allows": (
        replace(GOOD.with_files(**{"cpu.max": "150000 100000"}), threads=32),
        [("too-many-threads", "slow")],
        ["OMP_NUM_THREADS=2"],
    ),
    "one thread": (replace(GOOD, threads=1), [], []),
    "one thread, as torchrun sets it": (
        replace(GOOD, threads=1, environment={"OMP_NUM_THREADS": "1"}),
        [("few-threads", "note")],
        ["unset OMP_NUM_THREADS"],
    ),
    "one thread in each of four ranks, as torchrun sets it": (
        replace(GOOD, threads=1, environment={"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}),
        [("few-threads", "note")],
        ["OMP_NUM_THREADS=2 torchrun"],
    ),
    "two threads in each of four ranks": (
        replace(GOOD, threads=2, environment={"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}),
        [],
        [],
    ),
    "three threads in each of four ranks": (
        replace(GOOD, threads=3, environment={"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "4"}),
        [("too-many-threads", "slow")],
        ["OMP_NUM_THREADS=2 torchrun"],
    ),
    "others at work": (replace(GOOD, load=4.5), [("load", "note")], []),
    "few others at work": (replace(GOOD, load=3.5), [], []),
    "a slow governor": (
        replace(GOOD, files=cpu_files("scaling_governor", "powersave", "performance")),
        [("governor", "slow")],
        ["cpupower"],
    ),
    "a slow governor of a driver that follows the work": (
        replace(
            GOOD,
            files=cpu_files("scaling_governor", "powersave", "performance")
            | cpu_files("scaling_driver", "intel_pstate"),
        ),
        [("governor", "note")],
        ["cpupower"],
    ),
    "a governor that follows the work": (
        replace(GOOD, files=cpu_files("scaling_governor", "schedutil", "schedutil")),
        [("governor", "note")],
        ["cpupower"],
    ),
    "two sockets": (
        replace(GOOD, files={"sys/devices/system/node/node1/cpulist": "8-15\n"}),
        [("numa", "note")],
        ["numactl"],
    ),
    "no huge pages": (GOOD.with_files(enabled="always madvise [never]\n"), [("huge-pages-off", "note")], ["madvise"]),
    "swap in use": (
        GOOD.with_files(meminfo="MemAvailable: 67108864 kB\nSwapTotal: 4194304 kB\nSwapFree: 3145728 kB\n"),
        [("swap-used", "note")],
        [],
    ),
    "a little swap in use": (
        GOOD.with_files(meminfo="MemAvailable: 67108864 kB\nSwapTotal: 4194304 kB\nSwapFree: 4063232 kB\n"),
        [],
        [],
    ),
    "little memory": (GOOD.with_files(meminfo="MemAvailable: 1048576 kB\n"), [("low-memory", "slow")], []),
    "a container of little memory": (
        replace(GOOD, files={f"sys/fs/cgroup/memory.{n}": f"{b * GIB}" for n, b in (("max", 3), ("current", 2))}),
        [("low-memory", "slow")],
        [],
    ),
    "little shared memory": (
        replace(GOOD, shared_memory=64 * 2**20),
        [("small-shared-memory", "slow")],
        ["--shm-size="],
    ),
    "no shared memory": (replace(GOOD, shared_memory=None), [], []),
    "few files that may be open": (
        replace(GOOD, open_files=(1024, 524288)),
        [("few-open-files", "note")],
        ["ulimit -n 524288:"],  # no thousands separator, so that a shell accepts it
    ),
    "few files that may be open until someone asks": (
        replace(GOOD, open_files=(1024, UNLIMITED)),
        [("few-open-files", "note")],
        ["ulimit -n unlimited"],
    ),
    "any number of open files": (replace(GOOD, open_files=(UNLIMITED, UNLIMITED)), [], []),
    "variables of debugging": (
        environment(CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="0", PYTHONDEVMODE=""),
        [("debug-variable", "slow")],
        ["unset CUDA_LAUNCH_BLOCKING"],
    ),
    "a variable of debugging that counts with any value": (
        environment(PYTORCH_NO_CUDA_MEMORY_CACHING="0"),
        [("debug-variable", "slow")],
        ["unset PYTORCH_NO_CUDA_MEMORY_CACHING"],
    ),
    "a debugger": (replace(GOOD, traced=True), [("tracing", "slow")], []),
}


@pytest.mark.parametrize(("machine", "expected", "facts"), WRONG.values(), ids=WRONG)
def test_each_defect_is_found_and_no_other(
    examine: Examine, machine: Machine, expected: list[tuple[str, str]], facts: list[str]
) -> None:
    findings = examine(machine)
    assert wrong(findings) == expected
    fixes = "\n".join(finding.fix for finding in findings)
    assert all(fact in fixes for fact in facts)
    assert all(finding.fix for finding in findings if finding.verdict in ("slow", "broken"))
    assert not any("\n" in finding.found for finding in findings)
    assert machine.nvml is None or machine.nvml.open == 0


def test_findings_show_the_first_line_of_an_error(examine: Examine) -> None:
    too_old = replace(GOOD, gpus=(), cudnn=None, no_gpu="too old (found version 11040).\nMore.")
    assert named(examine(too_old), "driver").found.endswith("too old (found version 11040).")
    assert named(examine(gpu(fails="CUDA error: unavailable\nMore.")), "cuda:0").found.endswith("error: unavailable")


def test_a_failing_check_is_one_finding_and_other_checks_run(examine: Examine) -> None:
    findings = examine(replace(GOOD, load=OSError("no load\nat all"), gpus=RuntimeError("")))
    assert wrong(findings) == [("could-not-look", "note")] * 3
    assert {"driver", "cores", "threads", "governor", "RAM"} <= {finding.name for finding in findings}
    assert named(findings, "load").found.endswith("no load")
    assert named(findings, "gpus").found.endswith("RuntimeError")  # the error has no message


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (a@b)",
    ],
)
def test_the_drivers_version(examine: Examine, text: str) -> None:
    assert named(examine(replace(GOOD, files={DRIVER: text})), "driver").found == "535.104.05"


@pytest.mark.parametrize("text", ["", None])
def test_a_driver_without_a_version_has_no_finding(examine: Examine, text: str | None) -> None:
    findings = examine(replace(GOOD, files={DRIVER: text}))
    assert wrong(findings) == []
    assert "driver" not in {finding.name for finding in findings}


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_80", "sm_90"], (12, 0), False),
        (["sm_80", "compute_80"], (12, 0), True),
        (["sm_90a", "sm_100"], (10, 3), True),
        (["gfx90a"], (9, 0), False),
        ([], (9, 0), True),
    ],
)
def test_architectures(examine: Examine, built_for: list[str], capability: tuple[int, int], runs: bool) -> None:
    findings = examine(replace(gpu(capability=capability), torch_code=tuple(built_for)))
    assert (("torch-lacks-architecture", "broken") in wrong(findings)) == (not runs)
    if not runs:
        assert all(architecture in named(findings, "cuda:0 torch").found for architecture in built_for)


def test_every_used_name_of_nvml_exists_in_the_real_module(examine: Examine) -> None:
    real = pytest.importorskip("pynvml")
    fake = DoctorNvml()
    examine(replace(GOOD, nvml=fake))
    assert len(fake.asked) == 3 + len(fake.answers)
    assert not [name for name in fake.asked if not hasattr(real, name)]
    assert (real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, real.NVML_VOLATILE_ECC) == (1, 0)


@pytest.mark.parametrize(("number", "version"), [(92400, "9.24.0"), (90100, "9.1.0"), (8902, "8.9.2")])
def test_cudnns_version(examine: Examine, number: int, version: str) -> None:
    assert named(examine(replace(GOOD, cudnn=number)), "cuDNN").found == version


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("enabled", False, [("cudnn-off", "slow")]),
        ("deterministic", True, [("cudnn-deterministic", "note")]),
        ("benchmark", True, []),
    ],
)
def test_cudnns_flags(examine: Examine, flag: str, value: bool, expected: list[tuple[str, str]]) -> None:
    with torch.backends.cudnn.flags(**({"enabled": True} | {flag: value})):
        findings = examine(GOOD)
    assert wrong(findings) == expected
    assert (flag in named(findings, "cuDNN").found) == (flag != "enabled")


def by_new_flag(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


@pytest.mark.parametrize(
    ("put", "precision", "on"),
    [
        (torch.set_float32_matmul_precision, "highest", False),
        (torch.set_float32_matmul_precision, "high", True),
        (torch.set_float32_matmul_precision, "medium", True),
        (by_new_flag, "tf32", True),  # from here on torch.get_float32_matmul_precision raises
        (by_new_flag, "ieee", False),
        (by_new_flag, "none", False),
    ],
)
def test_tf32(examine: Examine, put: Callable[[str], None], precision: str, on: bool) -> None:
    put(precision)
    assert wrong(examine(GOOD)) == ([] if on else [("tf32-off", "slow")])
    assert not any(finding.name == "TF32" for finding in examine(gpu(name="Tesla T4", capability=(7, 5))))


def test_cores_are_reported_with_their_limits(examine: Examine) -> None:
    quotas = {"proc/self/cgroup": "0::/inner\n", "sys/fs/cgroup/inner/cpu.max": "300000 100000"}
    quotas |= {"sys/fs/cgroup/cpu.max": "150000 100000"}  # the tighter quota of the parent group
    found = named(examine(replace(GOOD, files=quotas, cpus=(64, 8), threads=2)), "cores").found
    assert re.findall(r"[\d.]+", found)[:4] == ["2", "64", "8", "1.5"]
    assert named(examine(replace(GOOD, cpus=(64, 64), threads=64)), "cores").found.startswith("64 ")


def test_swap_is_reported_in_gib(examine: Examine) -> None:
    meminfo = "MemAvailable: 67108864 kB\nSwapTotal: 4194304 kB\nSwapFree: 3145728 kB\n"
    assert named(examine(GOOD.with_files(meminfo=meminfo)), "swap").found.startswith("1.0 of 4.0 GiB")


def test_allocator_settings_are_reported(examine: Examine) -> None:
    findings = examine(environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"))
    assert named(findings, "allocator").found == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert wrong(findings) == []


def test_anomaly_detection_is_found(examine: Examine) -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert wrong(examine(GOOD)) == [("anomaly-detection", "slow")]


def test_a_virtual_machine_has_no_governor(examine: Examine) -> None:
    files = {path: None for path in cpu_files("scaling_governor", "", "")}
    findings = examine(replace(GOOD, files=files))
    assert wrong(findings) == []
    assert "governor" not in {finding.name for finding in findings}


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_finding_is_shown_at_every_width(width: int, ascii_only: bool) -> None:
    text = drawn(partial(show, FINDINGS), width, ascii_only)
    assert max(map(len, text.splitlines())) <= width
    squeezed = "".join(text.split())
    for finding in FINDINGS:
        assert finding.name.replace(" ", "") in squeezed
        assert finding.topic in squeezed
    if width >= 80:
        assert all(finding.found in text and finding.fix in text for finding in FINDINGS)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(WITHOUT_GPU, files={})
    with on(broken, tmp_path):
        assert main(["doctor"]) == 1
        assert "pytorch.org" in capsys.readouterr().out
        assert main(["doctor", "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == diagnosis.as_dicts(diagnosis.examine())
        file = tmp_path / "findings.json"
        assert main(["doctor", "--json", str(file)]) == 1
        assert json.loads(file.read_text()) == diagnosis.as_dicts(diagnosis.examine())
        assert "pytorch.org" in capsys.readouterr().out
        assert main(["doctor", "--json", str(tmp_path)]) == 1
        assert capsys.readouterr().out == ""
    (tmp_path / DRIVER).unlink()
    with on(WITHOUT_GPU, tmp_path):
        assert main(["doctor"]) == 0

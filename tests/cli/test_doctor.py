"""Findings of the doctor for each defect, and the page that shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from flatout.cli import diagnosis, main
from flatout.cli.diagnosis import Finding
from flatout.cli.doctor import blocks
from flatout.report.terminal import show
from tests.fake_machine import DRIVER, HEADER, WITHOUT_GPU, Gpu, Machine, on
from tests.reasons import finding_code
from tests.renderings.rendered import drawn
from tests.renderings.samples import FINDINGS

Examine = Callable[[Machine], tuple[Finding, ...]]


@pytest.fixture
def examine(tmp_path_factory: pytest.TempPathFactory) -> Examine:
    """Return the function that examines a fake machine."""

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


def test_this_machine_is_examined() -> None:
    findings = diagnosis.examine()
    assert {finding.topic for finding in findings} >= {"install", "GPU"}
    assert all(finding.name and finding.found for finding in findings)
    assert all(finding.fix for finding in findings if finding.verdict in ("slow", "broken"))


def test_nothing_is_wrong_with_a_good_machine(examine: Examine) -> None:
    findings = examine(GOOD)
    assert wrong(findings) == []
    names = [finding.name for finding in findings]
    assert names == ["flatout", "torch", "torch.compile", "driver", "cuda:0", "/dev/shm"]
    assert not any(finding.fix for finding in findings)


GOOD = Machine()


def gpu(**changes: object) -> Machine:
    return replace(GOOD, gpus=(replace(Gpu(), **changes),))  # type: ignore[arg-type]


WRONG = {
    # defect: (machine, findings with a verdict other than good, substrings of their fixes)
    "no kernels in a build for a GPU": (
        replace(GOOD, built_with_kernels=False),
        [("kernels-missing", "slow")],
        ["install a CUDA 13 toolkit", "CUDA_HOME"],
    ),
    "no kernels in a build for a GPU, with nvcc": (
        replace(GOOD, built_with_kernels=False, commands=("g++", "nvcc")),
        [("kernels-missing", "slow")],
        ["finds nvcc"],
    ),
    "no kernels in a build for CUDA, and no GPU": (
        replace(WITHOUT_GPU, torch_cuda="13.0"),
        [("kernels-missing", "note"), ("no-gpu", "note")],
        ["CUDA 13"],
    ),
    "no GPU": (WITHOUT_GPU, [("no-gpu", "note")], []),
    "torch for the CPU beside a GPU": (
        replace(WITHOUT_GPU, files={}),
        [("cpu-build", "broken"), ("no-gpu", "note")],
        ["https://pytorch.org"],
    ),
    "a driver that is too old": (
        replace(GOOD, gpus=(), no_gpu="The driver is too old (found version 11040).\nMore."),
        [("driver-unusable", "broken")],
        ["CUDA 13.0"],
    ),
    "hidden GPUs": (
        replace(GOOD, gpus=(), environment={"CUDA_VISIBLE_DEVICES": ""}),
        [("gpu-hidden", "note")],
        ["unset CUDA_VISIBLE_DEVICES"],
    ),
    "no NVML": (replace(GOOD, modules=("triton",)), [("no-nvml", "note")], ["pip install 'flatout[monitor]'"]),
    "no NVML, and no GPU for it": (replace(WITHOUT_GPU, modules=()), [("no-gpu", "note")], []),
    "no compiler": (replace(GOOD, commands=()), [("no-compiler", "slow")], ["g++"]),
    "another compiler": (replace(GOOD, commands=("icpx",), environment={"CXX": "icpx"}), [], []),
    "no headers of Python": (replace(GOOD, files={HEADER: None}), [("no-python-headers", "slow")], ["python3-dev"]),
    "no Triton": (replace(GOOD, modules=("pynvml",)), [("no-triton", "slow")], ["pip install triton"]),
    "nothing to compile with": (
        replace(GOOD, commands=(), files={HEADER: None}, modules=("pynvml",)),
        [("no-compiler", "slow"), ("no-python-headers", "slow"), ("no-triton", "slow")],
        [],
    ),
    "a slice of a GPU": (gpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"), [], []),
    "a GPU that flatout's kernels do not run on": (
        gpu(name="NVIDIA H100 PCIe", runs_kernels=False),
        [("kernels-for-other-gpus", "slow")],
        ["TORCH_CUDA_ARCH_LIST=9.0"],
    ),
    "a driver that is new enough for torch alone": (
        replace(gpu(runs_kernels=False), torch_cuda="12.6", cuda_versions=(12040, 13000)),
        [("driver-too-old", "slow")],
        ["CUDA 13.0", "CUDA 12 toolkit"],
    ),
    "a GPU without a data sheet": (gpu(name="NVIDIA A16", capability=(8, 6)), [("peak-unknown", "note")], []),
    "a GPU that fails": (
        gpu(fails="CUDA error: no kernel image is available\nCUDA kernel errors might be"),
        [("gpu-unusable", "broken")],
        ["nvidia-smi"],
    ),
    "little shared memory": (
        replace(GOOD, shared_memory=64 * 2**20),
        [("small-shared-memory", "slow")],
        ["--shm-size="],
    ),
    "no shared memory": (replace(GOOD, shared_memory=None), [], []),
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


def test_findings_show_the_first_line_of_an_error(examine: Examine) -> None:
    too_old = replace(GOOD, gpus=(), no_gpu="too old (found version 11040).\nMore.")
    assert named(examine(too_old), "driver").found.endswith("too old (found version 11040).")
    assert named(examine(gpu(fails="CUDA error: unavailable\nMore.")), "cuda:0").found.endswith("error: unavailable")


def test_a_failing_check_is_one_finding_and_other_checks_run(examine: Examine) -> None:
    findings = examine(replace(GOOD, gpus=RuntimeError("no GPU\nat all"), shared_memory=ValueError("no space")))
    assert wrong(findings) == [("could-not-check", "note")] * 2
    assert {"flatout", "torch", "torch.compile", "driver"} <= {finding.name for finding in findings}
    assert named(findings, "gpus").found.endswith("no GPU")
    assert named(findings, "shared memory").found.endswith("no space")


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
def test_the_version_of_a_driver_may_be_unknown(examine: Examine, text: str | None) -> None:
    assert wrong(examine(replace(GOOD, files={DRIVER: text}))) == []


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_finding_is_shown_at_every_width(width: int, ascii_only: bool) -> None:
    text = drawn(partial(show, [*blocks(FINDINGS)]), width, ascii_only)
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
        out = capsys.readouterr().out
        assert "pytorch.org" in out
        assert "PyTorch version: known" in out
        assert main(["doctor", "--json"]) == 1
        record = json.loads(capsys.readouterr().out)
        assert record["findings"] == [asdict(finding) for finding in diagnosis.examine()]
        assert record["environment"]["torch_version"] == "known"
        file = tmp_path / "findings.json"
        assert main(["doctor", "--json", str(file)]) == 1
        assert json.loads(file.read_text()) == record
        assert "pytorch.org" in capsys.readouterr().out
        assert main(["doctor", "--json", str(tmp_path)]) == 1
        assert capsys.readouterr().out == ""
    (tmp_path / DRIVER).unlink()
    with on(WITHOUT_GPU, tmp_path):
        assert main(["doctor"]) == 0


def test_findings_are_shown_if_torch_cannot_collect_its_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with on(replace(WITHOUT_GPU, environment_of_torch=OSError("no pip")), tmp_path):
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert "no pip" in out
        assert "torch.compile" in out
        assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"] == {}


def test_the_real_environment_of_torch_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["environment"]["torch_version"] == torch.__version__

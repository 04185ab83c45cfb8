"""Command lines for NVIDIA's tools."""

from __future__ import annotations

import shlex

import pytest

from flatout.profile import nsight
from tests.profile.conftest import Program


def test_lines_are_for_this_script_and_survive_a_shell() -> None:
    nsys, ncu = (shlex.split(line) for line in nsight.commands("my train.py", ["--name", "it's"], 7, 2))
    tail = ["profile", "--capture", "--warmup", "2", "--steps", "7", "my train.py", "--name", "it's"]
    assert nsys[-len(tail) :] == tail
    assert nsys[:2] == ["nsys", "profile"]
    for option in ("--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"):
        assert option in nsys
    assert "--capture-range-end=stop" in nsys
    assert ncu[ncu.index("--profile-from-start") + 1] == "off"
    assert ncu[ncu.index("--kernel-name") + 1] == "{kernel}"
    assert ncu[ncu.index("--set") + 1] == "full"
    assert ncu[-6:] == ["2", "--steps", "1", "my train.py", "--name", "it's"]
    assert ncu[ncu.index("--launch-count") + 1] == "3"
    assert " {kernel} " in nsight.commands("train.py", [], 7, 2)[1]  # the name contains quotes


@pytest.mark.parametrize(("level", "samples"), [("0", True), ("2", True), ("3", False), ("4", False), (None, False)])
def test_sampling_is_off_if_perf_is_not_permitted(program: Program, level: str | None, samples: bool) -> None:
    program.may_sample(level)
    line = nsight.commands("t.py", [], 1, 1)[0]
    assert ("--sample=none" not in line) == ("--cpuctxsw=none" not in line) == samples


@pytest.mark.parametrize(
    ("kernel", "bare"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, float, std::array<char*, 2ul> >(int, float)", None),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float, 4>(float*, int)", None),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("triton_poi_fused_relu_0", "triton_poi_fused_relu_0"),
        ("", "regex:."),
    ],
)
def test_a_kernel_is_filtered_by_its_bare_name(kernel: str, bare: str | None) -> None:
    expected = bare or ("vectorized_elementwise_kernel" if "vectorized" in kernel else "softmax_warp_forward")
    assert nsight.kernel_filter(kernel) == expected


def test_only_a_script_has_lines(program: Program) -> None:
    program.runs()  # a prompt, a notebook
    assert nsight.commands_of_main(10, 3) == ()
    program.runs("train.py", "--lr", "1")
    assert nsight.commands_of_main(10, 3) == nsight.commands("train.py", ["--lr", "1"], 10, 3)
    program.runs("train.py", module="package.train")  # python -m package.train
    assert nsight.commands_of_main(10, 3) == ()

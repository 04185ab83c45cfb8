"""Distinction between files of users and files of libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flatout
from flatout.profile.syncs import is_users, of_frame, short
from tests.profile.conftest import Program


@pytest.mark.parametrize(
    "file",
    [
        "torch/nn/modules/module.py",
        torch.__file__,
        flatout.__file__,
        "flatout/run.py",
        "contextlib.py",
        "multiprocessing/queues.py",
        "numpy/lib/npyio.py",
        "<string>",
        "<built-in method item of Tensor object at 0x7f>",
        "/tmp/torchinductor_me/ab/cabcd.py",
    ],
)
def test_files_of_libraries_are_not_the_users(file: str) -> None:
    assert not is_users(file)


@pytest.mark.parametrize(
    "file", ["train.py", "models/resnet.py", "timm/models/vision.py", "/elsewhere/data.py", "/tmp/ipykernel_1/2.py"]
)
def test_files_of_the_users(file: str) -> None:
    assert is_users(file)


def test_a_script_may_have_the_name_of_a_module(program: Program, tmp_path: Path) -> None:
    program.searches(str(tmp_path), *sys.path)
    assert not is_users("profile.py")
    program.runs(str(tmp_path / "profile.py"))
    assert is_users("profile.py")


def test_the_longest_folder_of_the_path_is_left_out(program: Program) -> None:
    program.searches("/a", "/a/b", "")
    assert short("/a/b/c/train.py") == "c/train.py"
    assert short("/a/bc/train.py") == "bc/train.py"
    assert short("/other/train.py") == "/other/train.py"


def test_the_innermost_frame_of_the_user_counts() -> None:
    place, code = torch.no_grad()(lambda: of_frame(sys._getframe(1)))()  # the line: torch's wrapper calls the lambda
    assert "test_places.py:" in place
    assert "# the line" in code
    assert of_frame(None) == ("", "")

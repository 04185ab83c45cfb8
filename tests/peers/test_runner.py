"""Runner of other projects' suites, on a project of three tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.peers.differences import Difference
from tests.peers.runner import Result, run, table
from tests.peers.suites import Suite

TESTS = """
import pytest
import torch
from torch.utils.data import DataLoader

def test_flatouts_classes_are_in_place():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert isinstance(torch.optim.AdamW([parameter]), torch.optim.AdamW)
    assert torch.optim.Adam.__module__.startswith(("flatout", "torch"))
    assert torch.amp.GradScaler(device="cpu").is_enabled()
    loader = DataLoader([1, 2, 3], batch_size=2)
    assert isinstance(loader, DataLoader) and [b.tolist() for b in loader] == [[1, 2], [3]] and loader.num_workers == 0

@pytest.mark.parametrize("name", ["GradScaler", "DataLoader", "Adam", "SGD"])
def test_torchs_classes_are_in_place(name):
    modules = torch.amp, torch.utils.data, torch.optim
    assert next(getattr(m, name) for m in modules if hasattr(m, name)).__module__.startswith("torch.")

def test_torchs_clipping_is_in_place():
    assert torch.nn.utils.clip_grad_norm_.__module__.startswith("torch.")

def test_fails_anywhere():
    assert False

@pytest.mark.skip
def test_is_skipped():
    pass
"""
SUITE = Suite("three", "project", ("optim", "amp", "clip", "data"), ("test_three.py", "test_of_another_version.py"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "project").mkdir()
    (folder / "project" / "test_three.py").write_text(TESTS)
    (folder / "project" / "version.txt").write_text("2.14.0a0\n")
    return folder


@pytest.fixture(scope="module")
def result(sources: Path) -> Result:
    known = (
        Difference("three", "*_torchs_classes_*", "flatout's classes are flatout's"),
        Difference("three", "*_flatouts_classes_*", "was mended"),
        Difference("three", "*_was_renamed", "has no test"),
        Difference("three", "*_fails_anywhere", "does not show here"),
        Difference("another", "*", "of another suite"),
    )
    return run(SUITE, sources, known)


def test_tests_that_the_checkout_lacks_are_left_out(sources: Path) -> None:
    assert SUITE.found(sources) == ["test_three.py"]
    assert not SUITE.found(sources / "empty")


@pytest.mark.slow
def test_failures_are_those_that_torchs_classes_pass(result: Result) -> None:
    assert result.version == "2.14.0a0"
    assert result.passed == ["test_three.py::test_flatouts_classes_are_in_place"]
    assert result.not_applicable == ["test_three.py::test_fails_anywhere", "test_three.py::test_is_skipped"]
    assert len(result.failed) == 5


@pytest.mark.slow
def test_failures_without_a_reason_and_reasons_without_a_failure_are_reported(result: Result) -> None:
    assert result.unexplained == ["test_three.py::test_torchs_clipping_is_in_place"]
    assert [difference.test for difference in result.stale] == ["*_flatouts_classes_*", "*_was_renamed"]


@pytest.mark.slow
def test_the_table_counts_and_explains(result: Result) -> None:
    assert "| three | 2.14.0a0 | 1 | 5 | 2 |" in table([result])
    assert "| three | 4 | flatout's classes are flatout's |" in table([result])


@pytest.mark.slow
def test_a_suite_that_cannot_run_is_an_error(sources: Path) -> None:
    with pytest.raises(RuntimeError, match="three"):
        run(replace(SUITE, select="no_test_has_this_name"), sources)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.14.0a0\n", "2.14.0a0"),
        ('# Apache License, Version 2.0\n__version__ = "1.15.0.dev0"\n', "1.15.0.dev0"),
        ("__version__ = '1.0.29'\n", "1.0.29"),
        ("# Apache License, Version 2.0\n", "unknown"),
    ],
)
def test_the_version_is_that_of_the_project(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "version.txt").write_text(text)
    assert SUITE.version(tmp_path) == version

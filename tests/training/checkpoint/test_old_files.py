"""Compatibility with plans and checkpoints of earlier versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.golden.files import ARGUMENTS, resume

FILES = Path(__file__).parent / "old_files"


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("version", sorted(folder.name for folder in FILES.iterdir()))
def test_training_resumes_from_the_files_of_an_earlier_version(version: str, name: str) -> None:
    resumed, recorded = resume(FILES / version, name)
    assert resumed.keys() == recorded.keys()
    for key, value in recorded.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-2, atol=1e-3)

"""Wording of everything that flatout shows."""

import pytest

from tests.renderings.samples import SAMPLES, file_of, render


@pytest.mark.parametrize("name", SAMPLES)
def test_each_rendering_equals_its_file(name: str) -> None:
    """Run ``python -m tests.renderings`` after a change of wording."""
    assert render(name) == file_of(name).read_text(encoding="utf-8")

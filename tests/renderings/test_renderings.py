"""What is shown to a person reads as it did."""

import pytest

from tests.renderings.samples import SAMPLES, file_of, render


@pytest.mark.parametrize("name", SAMPLES)
def test_it_reads_as_in_its_file(name: str) -> None:
    """After a change of wording, ``python -m tests.renderings`` writes the file."""
    assert render(name) == file_of(name).read_text(encoding="utf-8")

"""Each planted bug finds the code that the bug replaces."""

from __future__ import annotations

import pytest

from tests.emulated_cuda.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_original_of_a_bug_is_in_its_file_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.before) == 1

"""Places of mutants after a refactoring: a lost mutant must be replaced by an equivalent one."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation import mutants as module
from tests.mutation.mutants import SUBJECTS, Mutant, find, read


def test_every_mutant_has_a_place() -> None:
    mutants = read()
    lost = [mutant for mutant, place in zip(mutants, find(mutants), strict=True) if place is None]
    assert not lost, "give each an equivalent before and after in mutants.jsonl"


def test_every_mutant_changes_something_that_no_other_changes_alike() -> None:
    mutants = read()
    parsed = [(ast.dump(ast.parse(mutant.before)), ast.dump(ast.parse(mutant.after))) for mutant in mutants]
    assert all(before != after for before, after in parsed)
    changes = [
        (mutant.file, mutant.function, mutant.nth, *texts) for mutant, texts in zip(mutants, parsed, strict=True)
    ]
    assert len(set(changes)) == len(changes)


def test_every_subject_has_its_number_of_mutants() -> None:
    assert Counter(mutant.subject for mutant in read()) == {subject: count for subject, (count, _) in SUBJECTS.items()}


def test_a_mutant_is_found_in_its_file_or_in_the_only_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SOURCES", tmp_path)
    (tmp_path / "home.py").write_text("def f(x):\n    return x+1\n\ndef g(x):\n    return x\n")
    (tmp_path / "other.py").write_text("def g(x):\n    return x\n")
    mutant = Mutant("data", "home.py", "f", "return x + 1", 0, "return x - 1")
    shared = Mutant("data", "other.py", "g", "return x", 0, "return 0")
    here, moved, nearest = find([mutant, replace(mutant, file="gone.py"), shared])
    assert here is not None
    assert moved is not None
    assert nearest is not None
    assert (moved.file, moved.lines) == (here.file, here.lines)
    assert here.replaced(mutant.after).startswith("def f(x):\n    return x - 1\n\ndef g")
    assert nearest.file == tmp_path / "other.py"
    rewritten, ambiguous = replace(mutant, before="return 1 + x"), replace(shared, file="gone.py")
    assert find([rewritten, replace(mutant, nth=1), replace(mutant, function="g"), ambiguous]) == [None] * 4

"""Folders of checkpoints: the newest readable file, and the number of files to keep."""

import os
import re

import pytest

from flatout.training.checkpoint import CorruptCheckpointError, Folder, newest_in, write
from tests.training.checkpoint.sealing import of_a_later_version


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def filled(path, steps, keep=3):
    folder = Folder(path, keep)
    for step in steps:
        write(folder.path_of(step), {"steps": step})
        folder.prune()
    return folder


def test_a_new_folder_is_empty(tmp_path):
    assert Folder(tmp_path / "a" / "b", 1).newest() is None


def test_the_last_ones_are_kept(tmp_path):
    folder = filled(tmp_path, [9, 10, 100, 1000], keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000100.pt", "step-0000001000.pt"]
    assert folder.newest() == {"steps": 1000}


def test_a_step_beyond_ten_digits_is_newer(tmp_path):
    assert filled(tmp_path, [9_999_999_999, 10_000_000_000]).newest() == {"steps": 10_000_000_000}


def test_a_corrupt_checkpoint_is_renamed_and_the_previous_one_used(tmp_path):
    folder = filled(tmp_path, [1, 2, 3])
    damage(folder.path_of(3))
    with pytest.warns(RuntimeWarning, match=r"step-0000000003\.pt.*step-0000000002\.pt"):
        assert folder.newest() == {"steps": 2}
    assert "step-0000000003.pt.damaged" in os.listdir(tmp_path)


def test_a_corrupt_checkpoint_does_not_count_among_those_to_keep(tmp_path):
    folder = filled(tmp_path, [1, 5], keep=2)
    damage(folder.path_of(5))
    with pytest.warns(RuntimeWarning):
        folder.newest()
    filled(tmp_path, [2, 3], keep=2)
    assert folder.newest() == {"steps": 3}
    assert folder.path_of(2).exists()


def test_the_last_two_corrupt_checkpoints_are_kept_for_inspection(tmp_path):
    folder = filled(tmp_path, [1, 2, 3, 4], keep=4)
    for step in (2, 3, 4):
        damage(folder.path_of(step))
    with pytest.warns(RuntimeWarning):
        folder.newest()
    assert len(list(tmp_path.glob("*.damaged"))) == 3
    filled(tmp_path, [5], keep=1)
    assert sorted(os.listdir(tmp_path)) == [
        "step-0000000003.pt.damaged",
        "step-0000000004.pt.damaged",
        "step-0000000005.pt",
    ]


def test_if_all_files_are_corrupt_it_raises_and_renames_none(tmp_path):
    folder = filled(tmp_path, [1, 2])
    damage(folder.path_of(1))
    damage(folder.path_of(2))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CorruptCheckpointError, match=re.escape(str(tmp_path))):
        folder.newest()
    assert sorted(os.listdir(tmp_path)) == before


def test_an_intact_unreadable_checkpoint_is_no_reason_to_use_an_older_one(tmp_path):
    folder = filled(tmp_path, [1, 2])
    of_a_later_version(folder.path_of(2))
    with pytest.raises(ValueError, match=r"step-0000000002\.pt"):
        folder.newest()
    assert folder.path_of(2).exists()


def test_looking_changes_nothing(tmp_path):
    folder = filled(tmp_path, [1, 2])
    damage(folder.path_of(2))
    before = sorted(os.listdir(tmp_path))
    assert newest_in(tmp_path) == {"steps": 1}
    assert sorted(os.listdir(tmp_path)) == before
    assert newest_in(tmp_path / "nowhere") is None


def test_only_partial_files_of_a_crash_are_removed(tmp_path):
    folder = filled(tmp_path, [1])
    (tmp_path / ".step-0000000002.pt.tmp").write_bytes(b"half")
    for name in ("notes.txt", "step-2.txt", ".hidden"):
        (tmp_path / name).write_text("mine")
    Folder(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes.txt", "step-0000000001.pt", "step-2.txt"]
    folder.prune()
    assert len(os.listdir(tmp_path)) == 4


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"keep.* 0"):
        Folder(tmp_path, 0)

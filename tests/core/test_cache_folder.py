"""Cache folder: location, permissions, and rejection of files of other users."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flatout.core.cache_folder import LARGEST, cache_folder, read_own, write_own
from tests.helpers import room_for_files, special_file


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLATOUT_CACHE": "/scratch/f"}, "/scratch/f"),
        ({"FLATOUT_CACHE": "~/f", "XDG_CACHE_HOME": "/x"}, "/home/someone/f"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/flatout"),
        ({"XDG_CACHE_HOME": "", "FLATOUT_CACHE": ""}, "/home/someone/.cache/flatout"),
        ({"FLATOUT_CACHE": "off", "XDG_CACHE_HOME": "/x"}, None),
    ],
)
def test_the_folder_follows_the_environment(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLATOUT_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (None if expected is None else Path(expected))


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of a container may have neither HOME nor an entry in the list of users."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("FLATOUT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() is None


def test_a_file_comes_back_and_is_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for text in ("first", "sécond"):
        write_own(path, text)
        assert read_own(path) == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)] == [0o700, 0o700]
    assert [file.name for file in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "device"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    assert read_own(special_file(tmp_path, kind)) is None


def test_a_link_is_not_followed_and_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    write_own(target, "theirs")
    link.symlink_to(target)
    assert read_own(link) is None
    write_own(link, "own")
    assert (read_own(link), read_own(target)) == ("own", "theirs")


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own(tmp_path / "file", "text")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_own(tmp_path / "file") is None


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (LARGEST + 1)], ids=["no text", "too large"])
def test_unreadable_content_is_not_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_own(tmp_path / "file") is None


@pytest.mark.parametrize("folder", ["/proc/flatout", "/dev/null/flatout"])
def test_a_folder_that_cannot_be_made_is_no_error(folder: str) -> None:
    write_own(Path(folder) / "file", "text")
    assert read_own(Path(folder) / "file") is None


def test_a_full_disk_keeps_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_own(path, "first")
    with room_for_files(4096):
        write_own(path, "x" * 100_000)
    assert read_own(path) == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]

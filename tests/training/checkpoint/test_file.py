"""Checkpoint files: atomic writes, and rejection of corrupt files."""

import collections
import errno
import io
import os
import pickle
import random
import stat
import tarfile
import warnings
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.training.checkpoint import CorruptCheckpointError, read, write
from flatout.training.checkpoint.file import temporary_of
from tests.helpers import room_for_files, special_file
from tests.training.checkpoint.sealing import content_of, of_a_later_version, sealed

STATE = {
    "weights": collections.OrderedDict(w=torch.arange(12.0).reshape(3, 4), b=torch.ones(2, dtype=torch.bfloat16)),
    "step": 7,
    "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}],
    "milestones": collections.Counter({3: 1}),
    "name": "ü",
}


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "a.pt"
    write(path, STATE)
    return path


def test_a_written_file_reads_back_the_same(written):
    assert equal(read(written), STATE)


def test_torch_reads_it_without_flatout(written):
    assert equal(torch.load(written, weights_only=True), STATE)
    assert equal(torch.load(written, weights_only=True, mmap=True), STATE)


@settings(max_examples=300)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_detected(written, tmp_path_factory, data):
    content = bytearray(written.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    damaged = tmp_path_factory.getbasetemp() / "flipped.pt"
    damaged.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"flipped\.pt"):
        read(damaged)


def test_every_bit_of_the_trailer_counts(written, tmp_path):
    content = written.read_bytes()
    for bit in range(8 * (len(content) - 20), 8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "flipped.pt").write_bytes(flipped)
        with pytest.raises(CorruptCheckpointError):
            read(tmp_path / "flipped.pt")


@pytest.mark.parametrize("left", [0, 1, 19, 20, 21, 0.5, -21, -20, -1])
def test_a_truncated_file_is_detected(written, tmp_path, left):
    content = written.read_bytes()
    cut = tmp_path / "cut.pt"
    cut.write_bytes(content[: int(left * len(content)) if isinstance(left, float) else left])
    with pytest.raises(CorruptCheckpointError, match=r"cut\.pt"):
        read(cut)


def test_trailing_bytes_are_detected(written, tmp_path):
    (tmp_path / "long.pt").write_bytes(written.read_bytes() + b"\0")
    with pytest.raises(CorruptCheckpointError):
        read(tmp_path / "long.pt")


@pytest.mark.parametrize("kind", ["torch.save", "text"])
def test_a_foreign_file_is_refused(tmp_path, kind):
    path = tmp_path / "foreign.pt"
    if kind == "torch.save":
        torch.save(STATE, path)
    else:
        path.write_text("a plan, say\n" * 100)
    with pytest.raises(CorruptCheckpointError, match=r"foreign\.pt"):
        read(path)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, buffer = torch.jit.script(torch.nn.Linear(1, 1)), io.BytesIO()
        torch.jit.save(module, buffer)
    return buffer.getvalue()


def zipped(**records):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def tarred():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle", "sys_info"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return buffer.getvalue()


def in_the_old_format():
    buffer = io.BytesIO()
    torch.save(STATE, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


FOREIGN = {
    "nothing": lambda: b"",
    "junk": lambda: bytes(range(256)) * 9,
    "text": lambda: b"a plan, say" * 100,
    "TorchScript": scripted,
    "a tar": tarred,
    "a pickle": lambda: pickle.dumps(STATE["groups"]),
    "the old format of torch.save": in_the_old_format,
    "an empty zip": zipped,
    "a zip of a pickle of no torch": lambda: zipped(**{"data.pkl": pickle.dumps([1], 5), "version": "3"}),
    "a zip of an empty pickle": lambda: zipped(**{"data.pkl": b"", "version": "3"}),
    "a zip of a pickle that ends": lambda: zipped(**{"data.pkl": b"\x80\x02]q\x00(K", "version": "3"}),
    "a zip of a pickle of a stack that is empty": lambda: zipped(**{"data.pkl": b"\x80\x02.", "version": "3"}),
    "a zip without a version": lambda: zipped(**{"data.pkl": pickle.dumps([1], 2)}),
    "the first bytes of a zip": lambda: b"PK\x03\x04" + bytes(100),
}


@pytest.mark.filterwarnings("ignore:.*TorchScript archive")
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_with_a_valid_trailer_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"foreign\.pt"):
        read(sealed(tmp_path / "foreign.pt", FOREIGN[kind]()))


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "device"])
def test_a_path_that_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = special_file(tmp_path, kind)
    with pytest.raises(CorruptCheckpointError, match=path.name):
        read(path)


def test_mutated_bytes_under_a_valid_trailer_are_read_or_refused(written, tmp_path):
    content, draw = content_of(written), random.Random(0)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    refused = 0
    for i in range(600):
        mutated = bytearray(records["data.pkl"] if i % 2 else content)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(mutated))
            piece = bytes(draw.randrange(256) for _ in range(draw.randint(0, 3)))
            mutated[at : at + len(piece) + draw.randint(-1, 1) * draw.randint(0, 1)] = piece
        whole = zipped(**records | {"data.pkl": bytes(mutated)}) if i % 2 else bytes(mutated)
        try:
            read(sealed(tmp_path / "mutated.pt", whole))
        except ValueError:
            refused += 1
    assert refused > 200


def test_the_trailer_is_as_described(written, tmp_path):
    assert sealed(tmp_path / "again.pt", content_of(written)).read_bytes() == written.read_bytes()


def test_another_version_is_whole_and_refused(tmp_path):
    write(tmp_path / "new.pt", STATE)
    of_a_later_version(tmp_path / "new.pt")
    with pytest.raises(ValueError, match=r"new\.pt.*\b2\b.*\b1\b") as caught:
        read(tmp_path / "new.pt")
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    write(tmp_path / "evil.pt", {"model": Runs()})
    with pytest.raises(ValueError, match=r"evil\.pt") as caught:
        read(tmp_path / "evil.pt")
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert not (tmp_path / "made").exists()


def test_a_missing_file_raises_a_filenotfounderror(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.pt")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.pt"
    write(path, {"step": 1})
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        write(path, {"weights": torch.ones(1000), "step": lambda: 2})
    assert read(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_full_disk_raises_an_oserror(tmp_path):
    with room_for_files(100_000), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write(tmp_path / "a.pt", {"weights": torch.ones(1_000_000)})
    assert os.listdir(tmp_path) == []


def test_a_write_takes_the_place_of_one_that_was_killed(tmp_path):
    path = tmp_path / "a.pt"
    temporary_of(path).write_bytes(b"x" * 10_000)
    write(path, {"step": 1})
    assert read(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_the_file_has_default_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "a.pt", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == 0o644

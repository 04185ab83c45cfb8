"""Checks of a wheel before it is published, with wheels that have one fault each."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import tool

check_wheel = tool("check_wheel")
ARCHS = ["90-real", "120"]
PLATFORM = "manylinux_2_34_x86_64"


def fatbin(*images: tuple[int, int, bytes]) -> bytes:
    """Return a fat binary of images. Each has a kind (1: PTX, 2: SASS), an architecture and a payload."""
    body = b""
    for kind, arch, payload in images:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", arch)
        body += header.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


GPU_CODE = (
    bytes(8) + fatbin((2, 90, b"cubin" * 8)) + bytes(8) + fatbin((2, 120, b""), (1, 120, b"\x50\xed\x55\xba ptx!"))
)


def library(needed: tuple[str, ...] = ("libc.so.6",), runpath: str = "", **more: bytes) -> bytes:
    """Return an ELF file with these sections, and without code."""
    strings, dynamic = b"\0", b""
    for tag, texts in ((1, needed), (29, (runpath,) if runpath else ())):
        for text in texts:
            dynamic += struct.pack("<qQ", tag, len(strings))
            strings += text.encode() + b"\0"
    content = {"": b"", ".dynstr": strings, ".dynamic": dynamic + bytes(16)}
    content |= {f".{name}": data for name, data in more.items()}
    content[".shstrtab"] = b"\0".join(name.encode() for name in [*content, ".shstrtab"]) + b"\0"
    names, body, headers = content[".shstrtab"], b"", b""
    for name, data in content.items():
        at = names.index(name.encode() + b"\0")
        headers += struct.pack("<IIQQQQ", at, 1 if name else 0, 0, 0, 64 + len(body), len(data)).ljust(64, b"\0")
        body += data
    start = struct.pack("<Q", 64 + len(body))
    ending = struct.pack("<HHH", 64, len(content), len(content) - 1)
    return (b"\x7fELF".ljust(40, b"\0") + start).ljust(58, b"\0") + ending + body + headers


def sound_files() -> dict[str, bytes]:
    info = "flatout-0.1.0.dist-info"
    return {
        "flatout/__init__.py": b"",
        "flatout/examples/digits.py": b"",
        "flatout/examples/gpt.py": b"",
        "flatout/py.typed": b"",
        "flatout/native/_C.so": library(("libtorch_cpu.so", "libc.so.6"), nv_fatbin=GPU_CODE),
        "flatout/native/_host.cpython-311-x86_64-linux-gnu.so": library(),
        "flatout/native/_host.pyi": b"",
        "flatout/report/style.css": b".flatout{}",
        "pytest_flatout/__init__.py": b"",
        f"{info}/METADATA": b"Name: flatout\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: cp311-cp311-{PLATFORM}\n".encode(),
        f"{info}/licenses/LICENSE": b"MIT",
    }


def pack(
    folder: Path, files: dict[str, bytes], record: dict[str, bytes] | None = None, platform: str = PLATFORM
) -> Path:
    """Write a wheel whose RECORD is that of the files ``record``."""
    path = folder / f"flatout-0.1.0-cp311-cp311-{platform}.whl"
    lines = []
    for name, content in (files if record is None else record).items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    lines.append("flatout-0.1.0.dist-info/RECORD,,")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr("flatout-0.1.0.dist-info/RECORD", "\n".join(lines))
    return path


def test_a_sound_wheel_passes(tmp_path: Path) -> None:
    assert check_wheel.wheel_failures(pack(tmp_path, sound_files()), ARCHS) == []


@pytest.mark.parametrize("content", [b"1", b"2" * 1000])
def test_code_for_gpus_is_listed_by_architecture(content: bytes) -> None:
    code = check_wheel.gpu_code(fatbin((2, 75, content)) + fatbin((1, 80, content), (2, 80, content)))
    assert (code.sass, code.ptx) == ({75, 80}, {80})
    assert check_wheel.gpu_code(b"") == check_wheel.expected_code([])


def test_architectures_of_cmake_name_the_code() -> None:
    code = check_wheel.expected_code(["75-real", "90a-real", "100-virtual", "120"])
    assert (code.sass, code.ptx) == ({75, 90, 120}, {100, 120})


def replaced(name: str, content: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.update({name: content})


OPERATORS = "flatout/native/_C.so"


@pytest.mark.parametrize(
    "spoil",
    [
        replaced("flatout/tests/test_it.py", b""),
        replaced("tests/test_it.py", b""),
        replaced("flatout/test_it.py", b""),
        replaced("flatout/conftest.py", b""),
        replaced("flatout/native/step.cu", b""),
        replaced("flatout/native/libcudart.so.13", library()),
        replaced("flatout.libs/libtorch_cpu-1a2b3c.so", library()),
        replaced(OPERATORS, library(("libtorch_cpu.so", "libcudart.so.13"), nv_fatbin=GPU_CODE)),
        replaced(OPERATORS, library(("libtorch_cuda.so",), nv_fatbin=GPU_CODE)),
        replaced(OPERATORS, library(runpath="/root/build/lib", nv_fatbin=GPU_CODE)),
        replaced(OPERATORS, library(nv_fatbin=GPU_CODE, symtab=b"names")),
        replaced(OPERATORS, library(nv_fatbin=GPU_CODE, debug_info=b"lines")),
        replaced(OPERATORS, library(nv_fatbin=GPU_CODE, rodata=b"no\0/root/flatout/csrc/library.cpp\0")),
        replaced(OPERATORS, library()),
        replaced(OPERATORS, library(nv_fatbin=fatbin((2, 90, b""), (2, 120, b"")))),
        replaced("flatout-0.1.0.dist-info/WHEEL", b"Tag: cp311-cp311-linux_x86_64\n"),
        lambda files: files.pop("flatout/py.typed"),
        lambda files: files.pop("flatout/examples/gpt.py"),
        lambda files: files.pop(OPERATORS),
    ],
)
def test_each_fault_is_found(tmp_path: Path, spoil: Callable[[dict[str, bytes]], None]) -> None:
    files = sound_files()
    spoil(files)
    assert check_wheel.wheel_failures(pack(tmp_path, files), ARCHS) != []


@pytest.mark.parametrize("platform", ["linux_x86_64", "manylinux_2_35_x86_64", "win_amd64"])
def test_platforms_that_are_too_new_or_of_this_machine(tmp_path: Path, platform: str) -> None:
    files = sound_files()
    files["flatout-0.1.0.dist-info/WHEEL"] = f"Tag: cp311-cp311-{platform}\n".encode()
    assert len(check_wheel.wheel_failures(pack(tmp_path, files, platform=platform), ARCHS)) == 1


def test_a_record_that_lies(tmp_path: Path) -> None:
    for change in ({"flatout/__init__.py": b"other"}, {"flatout/more.py": b""}):
        assert len(check_wheel.wheel_failures(pack(tmp_path, sound_files(), sound_files() | change), ARCHS)) == 1
    less = sound_files()
    less.pop("flatout/__init__.py")
    assert len(check_wheel.wheel_failures(pack(tmp_path, sound_files(), less), ARCHS)) == 1


def test_a_wheel_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pack(tmp_path, sound_files())
    monkeypatch.setattr(check_wheel, "LARGEST_WHEEL", path.stat().st_size)
    assert len(check_wheel.wheel_failures(path, ARCHS)) == 1


def pack_sources(folder: Path, *names: str) -> Path:
    path = folder / "flatout-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"flatout-0.1.0/{name}"), io.BytesIO())
    return path


SOURCES = (*check_wheel.BUILD_FILES, *(f"{folder}file" for folder in check_wheel.BUILD_FOLDERS))


def test_a_source_archive_holds_what_a_build_needs(tmp_path: Path) -> None:
    assert check_wheel.sdist_failures(pack_sources(tmp_path, *SOURCES)) == []
    for name in SOURCES:
        assert len(check_wheel.sdist_failures(pack_sources(tmp_path, *set(SOURCES) - {name}))) == 1
    for name in (".ci/run", "benchmarks/results/all.json", "build/_C.so", "src/flatout/native/_C.so"):
        assert len(check_wheel.sdist_failures(pack_sources(tmp_path, *SOURCES, name))) == 1


def test_the_command_reports_by_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(pack(tmp_path, sound_files())), str(pack_sources(tmp_path, *SOURCES))]
    assert check_wheel.main([*paths, "--archs", "90-real;120"]) == 0
    assert check_wheel.main([*paths, "--archs", "ALL"]) == 1
    assert "120" in capsys.readouterr().err

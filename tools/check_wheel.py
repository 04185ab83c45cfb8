"""Checks of a wheel and a source archive before they are published.

Usage: python tools/check_wheel.py dist/flatout-*.whl dist/flatout-*.tar.gz [--archs "90-real"]

Exits with status 1 if a check fails, and prints each failure.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

LARGEST_WHEEL = 30_000_000
"""Bytes."""

NEWEST_GLIBC = (2, 34)
"""Platform tags up to ``manylinux_2_34`` are accepted."""

ALL_ARCHS = ("75-real", "80", "90-real", "100-real", "120-real")
"""CUDA architectures of a published wheel, as in ``cmake/CudaArchitectures.cmake``."""

FILES_OF_A_WHEEL = re.compile(
    r"flatout/([a-z_0-9]+/)*[a-z_0-9]+\.pyi?|flatout/py\.typed|flatout/native/_C\.so|pytest_flatout/__init__\.py"
    r"|flatout/report/style\.css|flatout/native/_host\.[\w.-]+\.so"
    r"|flatout-[\d.]+\.dist-info/(METADATA|RECORD|WHEEL|entry_points\.txt|licenses/LICENSE)"
    r"|flatout-[\d.]+\.dist-info/sboms/[\w.-]+"
)
TEST_FILES = re.compile(r"(^|/)(tests?/|test_[^/]*\.py|conftest\.py)")
NEEDED_FILES = (
    "flatout/__init__.py",
    "flatout/examples/digits.py",
    "flatout/examples/gpt.py",
    "flatout/py.typed",
    "flatout/native/_C.so",
    "flatout/native/_host.pyi",
)
LIBRARIES = {"libtorch_cpu.so", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "libpthread.so.0"} | {
    "libdl.so.2",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
"""Shared libraries that a module may need. torch brings its own. The others are those of a manylinux system."""

BUILD_PATH = re.compile(rb"/[\w./+-]*/(csrc|torch/include)/[\w./-]+")
"""Absolute path of a source file of flatout or of a header of torch."""

BUILD_FILES = ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "tools/flatout_build.py")
BUILD_FOLDERS = ("cmake/", "csrc/", "examples/", "src/flatout/", "src/pytest_flatout/")


@dataclass(frozen=True)
class GpuCode:
    """Architectures of the CUDA code in a library, as numbers such as 90."""

    sass: frozenset[int]
    ptx: frozenset[int]


def gpu_code(fatbin: bytes) -> GpuCode:
    """Return the architectures in a section ``.nv_fatbin``.

    A fat binary is a header (magic, version, header bytes, payload bytes) and images. An image has a header (kind,
    version, header bytes, payload bytes, …, architecture at byte 28) and a payload.
    """
    sass, ptx = set(), set()
    at = fatbin.find(_FATBIN_MAGIC)
    while at >= 0:
        header, payload = struct.unpack_from("<HQ", fatbin, at + 6)
        image, end = at + header, at + header + payload
        while image < end:
            kind, _, image_header, image_payload = struct.unpack_from("<HHIQ", fatbin, image)
            (arch,) = struct.unpack_from("<I", fatbin, image + 28)
            (ptx if kind == _PTX else sass).add(arch)
            image += image_header + image_payload
        at = fatbin.find(_FATBIN_MAGIC, end)
    return GpuCode(frozenset(sass), frozenset(ptx))


_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_PTX = 1


def expected_code(archs: Sequence[str]) -> GpuCode:
    """Return the code that CMake architectures ask for, such as "90-real" or "120", which also has PTX."""
    numbers = {arch: int(re.match(r"\d+", arch)[0]) for arch in archs}  # type: ignore[index]
    return GpuCode(
        frozenset(number for arch, number in numbers.items() if not arch.endswith("-virtual")),
        frozenset(number for arch, number in numbers.items() if not arch.endswith("-real")),
    )


def sections(elf: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit little-endian ELF file by name."""
    start, (size, count, names) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + size * number) for number in range(count)]
    content = [b"" if kind == _NOBITS else elf[at : at + length] for _, kind, _, _, at, length in headers]
    return {_text(content[names], header[0]): data for header, data in zip(headers, content, strict=True)}


def dynamic_texts(elf: dict[str, bytes], tags: Sequence[int]) -> list[str]:
    """Return the texts of dynamic entries, such as the names of needed libraries."""
    entries = struct.iter_unpack("<qQ", elf.get(".dynamic", b""))
    return [_text(elf[".dynstr"], value) for tag, value in entries if tag in tags]


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


_NOBITS = 8
NEEDED = (1,)
"""Tag of a needed library in ``.dynamic``."""

RPATHS = (15, 29)
"""Tags of a search path of libraries in ``.dynamic``."""


def library_failures(name: str, content: bytes, archs: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a shared library of the wheel."""
    elf = sections(content)
    for path in dynamic_texts(elf, RPATHS):
        yield f"{name} must have no RPATH, got {path}"
    for needed in dynamic_texts(elf, NEEDED):
        if needed not in LIBRARIES:
            yield f"{name} must need no library but torch's and the system's, got {needed}"
    if debug := [section for section in elf if section.startswith((".debug_", ".symtab"))]:
        yield f"{name} must be stripped, got the sections {', '.join(debug)}"
    for section, data in elf.items():
        # nvcc writes absolute paths into GPU code, where profilers look for source lines.
        if section != ".nv_fatbin" and (path := BUILD_PATH.search(data)):
            yield f"{name} must not name folders of this machine, got {path[0].decode()}"
    if name.endswith("/_C.so"):
        found, expected = gpu_code(elf.get(".nv_fatbin", b"")), expected_code(archs)
        if found != expected:
            yield f"{name} must have {_told(expected)}, got {_told(found)}"


def _told(code: GpuCode) -> str:
    return f"SASS for {sorted(code.sass)} and PTX for {sorted(code.ptx)}"


def record_failures(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Yield files that differ from their line in RECORD, and files on one side only."""
    (record,) = (name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
    rows = {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(wheel.read(record).decode()))}
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    for name in sorted(names ^ rows.keys()):
        yield f"RECORD must list exactly the files of the wheel, got {name} in one of them"
    for name in sorted((names & rows.keys()) - {record}):
        content = wheel.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if rows[name] != (f"sha256={digest}", str(len(content))):
            yield f"RECORD must have the digest and the size of {name}, got {rows[name]}"


def tag_failures(path: Path, wheel: zipfile.ZipFile) -> Iterator[str]:
    """Yield what is wrong with the platform tags of the file name, and tags in WHEEL that differ."""
    *_, python, abi, platforms = path.stem.split("-")
    for platform in platforms.split("."):
        match = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", platform)
        if match is None or (int(match[1]), int(match[2])) > NEWEST_GLIBC:
            limit = "_".join(map(str, NEWEST_GLIBC))
            yield f"the platform must be manylinux_{limit} or older, got {platform}"
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    told = set(Parser().parsestr(wheel.read(name).decode()).get_all("Tag") or [])
    if told != (named := {f"{python}-{abi}-{platform}" for platform in platforms.split(".")}):
        yield f"WHEEL must have the tags of the file name {sorted(named)}, got {sorted(told)}"


def wheel_failures(path: Path, archs: Sequence[str] = ALL_ARCHS) -> list[str]:
    """Return what is wrong with a wheel. The list is empty if nothing is."""
    failures = []
    if (size := path.stat().st_size) >= LARGEST_WHEEL:
        failures.append(f"the wheel must be smaller than {LARGEST_WHEEL:,} bytes, got {size:,}")
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        failures += [f"the wheel must hold {name}, got none" for name in NEEDED_FILES if name not in names]
        for name in names:
            if not FILES_OF_A_WHEEL.fullmatch(name) or TEST_FILES.search(name):
                failures.append(f"the wheel must hold only what an installation needs, got {name}")
        failures += [*tag_failures(path, wheel), *record_failures(wheel)]
        for name in names:
            if name.endswith(".so"):
                failures += library_failures(name, wheel.read(name), archs)
    return failures


def sdist_failures(path: Path) -> list[str]:
    """Return what is wrong with a source archive. The list is empty if nothing is."""
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    failures = [f"the source archive must hold {name}, got none" for name in BUILD_FILES if name not in names]
    failures += [
        f"the source archive must hold files in {folder}, got none"
        for folder in BUILD_FOLDERS
        if not any(name.startswith(folder) for name in names)
    ]
    failures += [
        f"the source archive must hold sources only, got {name}"
        for name in names
        if name.startswith((".ci", "benchmarks/results", "build/", "dist/", ".venv")) or name.endswith((".so", ".pyc"))
    ]
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Check the files of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a wheel and a source archive before they are published.")
    parser.add_argument("files", nargs="+", type=Path, help="wheels (.whl) and source archives (.tar.gz)")
    parser.add_argument("--archs", default="ALL", help='CMake CUDA architectures of the wheel, such as "80-real;90"')
    args = parser.parse_args(argv)
    archs = ALL_ARCHS if args.archs == "ALL" else args.archs.split(";")
    failed = False
    for path in args.files:
        failures = wheel_failures(path, archs) if path.suffix == ".whl" else sdist_failures(path)
        for failure in failures:
            print(f"{path.name}: {failure}", file=sys.stderr)
        failed = failed or bool(failures)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(failures) or 'nothing'} wrong")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

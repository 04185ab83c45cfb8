"""Resources that nvcc has assigned to the kernels of the built library.

python -m tests.native.resource_table            prints the table of the installed library
python -m tests.native.resource_table --write    prints the table and writes resource_table.txt
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from flatout.native import _host

LIBRARY = Path(_host.__file__).with_name("_C.so")
TABLE = Path(__file__).with_name("resource_table.txt")
ARCHITECTURE = "sm_90"
WARPS, REGISTERS, SHARED = 64, 65536, 233472
"""Limits of one multiprocessor of sm_90. Shared memory is in bytes. Each block takes 1 KiB more than it requests."""


@dataclass(frozen=True)
class Kernel:
    """Resources of one kernel.

    Attributes:
        threads: maximum number of threads per block.
        registers: registers per thread.
        occupancy: resident warps of a multiprocessor, in percent of 64.
        stack: bytes of stack per thread, such as for spilled registers.
        load: widest load from global memory, in bits.
        store: widest store to global memory, in bits.
    """

    threads: int
    registers: int
    occupancy: int
    stack: int
    load: int
    store: int

    @property
    def blocks(self) -> int:
        """Resident blocks of a multiprocessor."""
        return -(-self.occupancy * WARPS // 100) * 32 // self.threads


WHEELS = Path(sysconfig.get_path("platlib"))
SEARCH = os.pathsep.join(
    [
        os.environ.get("PATH", ""),
        "/usr/local/cuda/bin",
        f"{WHEELS}/nvidia/cu13/bin",
        f"{WHEELS}/triton/backends/nvidia/bin",
    ]
)
"""Folders that may contain cuobjdump and nvdisasm. cuobjdump runs nvdisasm."""


def cuobjdump() -> str | None:
    """Return the path of cuobjdump, or None if cuobjdump or nvdisasm is missing."""
    return shutil.which("cuobjdump", path=SEARCH) if shutil.which("nvdisasm", path=SEARCH) else None


@functools.cache
def dump(tool: str, *options: str) -> str:
    """Return the output of cuobjdump for sm_90. The output is empty if the library has no code for sm_90."""
    command = [tool, "-arch", ARCHITECTURE, *options, str(LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": SEARCH}).stdout


def compiler(tool: str) -> str:
    """Return the version of the CUDA compiler, or an empty string if the library has no code for sm_90."""
    found = re.search(r"Cuda compilation tools, release [\d.]+, V([\d.]+)", dump(tool, "-elf"))
    return found[1] if found else ""


def kernels(tool: str) -> dict[str, Kernel]:
    """Return the resources of the sm_90 kernels, by kernel name."""
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(tool, "--dump-resource-usage"))
    blocks = _threads(dump(tool, "-elf"))
    code = dict(each.split(maxsplit=1) for each in dump(tool, "-sass").split("Function : ")[1:])
    found = {}
    for name, registers, stack, shared in usage:
        found[_readable(name)] = Kernel(
            blocks[name],
            int(registers),
            _occupancy(blocks[name], int(registers), int(shared)),
            int(stack),
            _widest(r"\bLDG\.\S*", code[name]),
            _widest(r"\bSTG\.\S*", code[name]),
        )
    return dict(sorted(found.items()))


def _threads(elf: str) -> dict[str, int]:
    """Return the maximum threads per block of each kernel, as ``__launch_bounds__`` sets them."""
    threads = {}
    sections = re.split(r"^\.nv\.info\.(\S+)$", elf, flags=re.MULTILINE)
    for name, section in zip(sections[1::2], sections[2::2], strict=True):
        found = re.search(r"EIATTR_MAX_THREADS\n.*\n\s+Value:\s+(0x\w+)", section)
        threads[name] = int(found[1], 16) if found else 1024
    return threads


def _occupancy(threads: int, registers: int, shared: int) -> int:
    """Return the occupancy in percent. Each warp gets registers in multiples of 256."""
    warps = -(-threads // 32)
    blocks = min(WARPS // warps, REGISTERS // (-(-registers * 32 // 256) * 256) // warps, SHARED // (shared + 1024))
    return 100 * blocks * warps // WARPS


def _widest(instruction: str, code: str) -> int:
    widths = [re.search(r"\.[US]?(8|16|64|128)\b", each) for each in re.findall(instruction, code)]
    return max((int(width[1]) if width else 32 for width in widths), default=0)


def _readable(name: str) -> str:
    """Return the demangled name without namespaces, parameters and return type."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p
    text = demangle(name.encode(), None, None, None).decode()
    text = re.sub(r"^void |flatout::|\(anonymous namespace\)::", "", text)
    return re.sub(r"\((?![A-Z]\w*\)\d).*", "", text)


def written(version: str, found: dict[str, Kernel]) -> str:
    """Return the table as text."""
    names = [field.name for field in fields(Kernel)]
    lines = [f"# {ARCHITECTURE}, nvcc {version}: python -m tests.native.resource_table --write"]
    lines += ["  ".join([*names, "kernel"])]
    for kernel, resources in found.items():
        values = (str(value).rjust(len(name)) for name, value in zip(names, astuple(resources), strict=True))
        lines.append("  ".join([*values, kernel]))
    return "\n".join(lines) + "\n"


def read(text: str) -> tuple[str, dict[str, Kernel]]:
    """Parse a table, and return the version of nvcc and the kernels."""
    title, _, *lines = text.splitlines()
    version = re.search(r"nvcc ([\d.]+)", title)
    found = {}
    for line in lines:
        *values, kernel = line.split(maxsplit=len(fields(Kernel)))
        found[kernel] = Kernel(*map(int, values))
    return version[1] if version else "", found


def main() -> None:
    """Print the table. With ``--write``, also write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    tool = cuobjdump()
    if tool is None:
        raise SystemExit("cuobjdump must be on the PATH, found none. Install a CUDA toolkit or triton.")
    text = written(compiler(tool), kernels(tool))
    print(text, end="")
    if options.write:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()

"""Bugs that are planted in the sources, one at a time, and the check that finds each.

python -m tests.emulated_cuda.mutants --build build/mutants [--only NAME]

A copy of the project is changed, built and checked. Each check must pass on the copy as it is, and fail with the bug.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tests.emulated_cuda.run import make_console

ROOT = Path(__file__).parents[2]
COPIED = ["CMakeLists.txt", "cmake", "csrc", "pyproject.toml", "src", "tests"]
LIMIT = 600
"""Seconds of a check."""
EVIDENCE = re.compile(r"emulated CUDA: .*|.*WARNING: ThreadSanitizer: .*|.*runtime error: .*|.*FAILED.*|.*rror: .*")
"""Lines that describe the failure of a check."""


@dataclass(frozen=True)
class Check:
    """Command that passes on the sources as they are.

    Attributes:
        name: name in the table.
        targets: targets that the build must make for the check.
        arguments: program and arguments, relative to the build folder; or files of tests and options of pytest.
        order: order of operations; empty for a program.
    """

    name: str
    targets: tuple[str, ...]
    arguments: tuple[str, ...]
    order: str = ""

    def run(self, tree: Path, build: Path) -> tuple[bool, str]:
        """Return True if the check passes, else False, and the line that describes the failure."""
        if self.order:
            command = [sys.executable, "-m", "tests.emulated_cuda.run", *self.arguments]
            command += ["--build", str(build), "--orders", self.order]
        else:
            command = [str(build / "tests" / "emulated_cuda" / self.arguments[0]), *self.arguments[1:]]
        try:
            ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return False, f"more than {LIMIT} s"
        found = EVIDENCE.search(ended.stdout + ended.stderr)
        return ended.returncode == 0, "" if found is None else found.group().strip()


KERNELS = Check("kernels", ("emulated_kernels",), ("emulated_kernels",))
UNDEFINED = Check("kernels, UBSan", ("emulated_kernels_asan",), ("emulated_kernels_asan", "--small"))
RACES = Check("kernels, TSan", ("emulated_kernels_tsan",), ("emulated_kernels_tsan", "--small"))


def on_devices(*arguments: str, order: str = "lazy") -> Check:
    """Return a check of test files on the emulated devices."""
    file = Path(arguments[0]).name
    return Check(f"{file}, {order}", ("flatout_ops", "flatout_host", "emulated_aten"), arguments, order)


PREFETCH = on_devices("tests/gpu/test_prefetch.py")
MEMORY = on_devices("tests/gpu/test_prefetch_memory.py", "-k", "stream_order")
UPDATES = on_devices("tests/gpu/test_update_path.py")
OPTIONS = on_devices("tests/gpu/test_update_path_options.py", "-k", "table or graph or streams or freed")
DEVICES = on_devices("tests/emulated_cuda/test_devices.py")


@dataclass(frozen=True)
class Mutant:
    """Bug in one place of a file."""

    name: str
    file: str
    before: str
    after: str
    check: Check


MUTANTS = [
    Mutant(
        "missing barrier",
        "csrc/scaling/check.cu",
        "  __syncthreads();\n  if (threadIdx.x < kLanes)\n",
        "  if (threadIdx.x < kLanes)\n",
        KERNELS,
    ),
    Mutant(
        "missing order of an atomic operation",
        "csrc/core/last_block.cuh",
        "emulated::add_acquire_release(counter, value)",
        "atomicAdd(counter, value)",
        RACES,
    ),
    Mutant(
        "steps counted before all blocks have read the counts",
        "csrc/optim/step_kernel.cuh",
        "finishes_last(table.ticket, 1, gridDim.x)",
        "finishes_last(table.ticket, 1, 1)",
        RACES,
    ),
    Mutant(
        "powers read before they are computed",
        "csrc/optim/step_kernel.cuh",
        "    __syncwarp();\n    if (threadIdx.x == 0) finish_start",
        "    if (threadIdx.x == 0) finish_start",
        KERNELS,
    ),
    Mutant("wrong shuffle offset", "csrc/scaling/block_sum.cuh", "int offset = 16;", "int offset = 8;", KERNELS),
    Mutant("wrong shuffle mask", "csrc/core/warp.cuh", "0xFFFFFFFFu", "0xFFFFu", KERNELS),
    Mutant("counter not reset", "csrc/core/last_block.cuh", "  *counter = 0;\n", "", KERNELS),
    Mutant(
        "slot reused early",
        "csrc/prefetch/stager.cpp",
        "  hold_until_passed(copied, stream);\n}",
        "  hold_until_passed(copied, stream);\n  copied->slots.clear();\n}",
        PREFETCH,
    ),
    Mutant(
        "consumer does not wait",
        "src/flatout/data/transfer.py",
        "        self._copied.block(stream.cuda_stream)\n",
        "        pass\n",
        PREFETCH,
    ),
    Mutant(
        "copy does not wait for the fence",
        "csrc/prefetch/stager.cpp",
        "  if (on_device && fence != 0) cuda::wait_event(stream, fence);\n",
        "",
        PREFETCH,
    ),
    Mutant(
        "memory freed under a reader",
        "src/flatout/core/torch_state.py",
        "                tensor.record_stream(stream)\n",
        "                pass\n",
        MEMORY,
    ),
    Mutant(
        "memset on the wrong stream",
        "csrc/scaling/check_cuda.cpp",
        "sizeof(*counter.own), stream)",
        "sizeof(*counter.own), cudaStreamPerThread)",
        UPDATES,
    ),
    Mutant(
        "wrong device",
        "csrc/core/cuda_runtime.cpp",
        "  error_ = cudaSetDevice(device);\n",
        "  error_ = cudaSetDevice(0);\n",
        DEVICES,
    ),
    Mutant(
        "use after free",
        "csrc/optim/step_cuda.cpp",
        "    if (is_capturing(stream)) return new_table(tensors, stream);\n",
        "",
        OPTIONS,
    ),
    Mutant(
        "call that a capture prohibits",
        "csrc/optim/step_cuda.cpp",
        "    const CudaScope scope(leader());\n",
        '    const CudaScope scope(leader());\n    check_cuda(cudaStreamSynchronize(scope.stream()), "sync");\n',
        OPTIONS,
    ),
    Mutant(
        "misaligned vector",
        "csrc/core/chunks.h",
        "(kVectorBytes - misaligned) / element_size;",
        "(kVectorBytes - misaligned) / element_size + 1;",
        UNDEFINED,
    ),
]


class Copy:
    """Copy of the project, with a separate build."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.build = folder / "tree", folder / "build"
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir(parents=True)
        for name in COPIED:
            # `shutil.copy` sets new file times, so that the build replaces objects that hold a bug of an earlier run.
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.tree / name, copy_function=shutil.copy)
            else:
                shutil.copy(ROOT / name, self.tree / name)
        self._configure()

    def _configure(self) -> None:
        tools = Path(sys.executable).parent
        self._cmake(
            *("-S", self.tree, "-B", self.build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
            *(f"-DPython_EXECUTABLE={sys.executable}", "-DFLATOUT_CUDA=EMULATED"),
        )

    def make(self, check: Check) -> None:
        """Build the targets of a check."""
        self._cmake("--build", self.build, "--target", *check.targets)

    def _cmake(self, *arguments: str | Path) -> None:
        cmake = Path(sys.executable).parent / "cmake"
        ended = subprocess.run([cmake, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode != 0:
            raise RuntimeError(ended.stdout)

    @contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """Plant a bug inside the block."""
        file = self.tree / mutant.file
        original = file.read_text(encoding="utf-8")
        if original.count(mutant.before) != 1:
            raise ValueError(f"{mutant.file} must hold the original of {mutant.name!r} once. Update the mutant")
        file.write_text(original.replace(mutant.before, mutant.after), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(original, encoding="utf-8")


def main() -> int:
    """Check the sources as they are and with each bug, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--only", default="", help="part of a bug's name")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if options.only in mutant.name]
    copy, console = Copy(options.build.resolve()), make_console()
    has_failed = False
    for check in dict.fromkeys(mutant.check for mutant in mutants):
        copy.make(check)
        passes, evidence = check.run(copy.tree, copy.build)
        has_failed |= not passes
        console.print(f"without a bug: {check.name}: {'passes' if passes else f'FAILS: {evidence}'}", highlight=False)
    table = Table("bug", "file", "found by", "as", "s")
    for mutant in mutants:
        begun = time.perf_counter()
        with copy.with_bug(mutant):
            copy.make(mutant.check)
            passes, evidence = mutant.check.run(copy.tree, copy.build)
        has_failed |= passes
        seconds = f"{time.perf_counter() - begun:.0f}"
        found_by, style = ("NOTHING", "red") if passes else (mutant.check.name, "")
        table.add_row(mutant.name, mutant.file, found_by, evidence, seconds, style=style)
        console.print(f"{mutant.name}: {found_by}: {evidence}", markup=False, highlight=False)
    console.print(table)
    return int(has_failed)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())

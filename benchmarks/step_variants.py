"""Times of optimizer steps with other numbers of threads per block and of elements per chunk.

    pytest benchmarks/step_variants.py -s --full

Each variant is a program (benchmarks/support/step_variant.cu) that nvcc compiles with a copy of csrc. In the copy, two
constants have other values. The programs run one after another, and each measures a copy, too. The benchmark has not
run on a GPU yet.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scale import scaled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: none found")

ROOT = Path(__file__).parents[1]
THREADS, CHUNKS = (128, 256, 512), (8192, 16384, 32768)
PLACES = {
    "optim/step_kernel.cuh": r"(constexpr uint32_t kThreadsOf =)[^;]*;",
    "core/chunks.h": r"(constexpr uint32_t kChunk =)[^;]*;",
}
"""Definitions of the constants, by file of csrc."""


@dataclass(frozen=True)
class Variant:
    threads: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.chunk:,} elements"


def sources(variant: Variant, folder: Path) -> Path:
    """Copy csrc, and change its constants.

    Raises:
        ValueError: csrc has no such definition.
    """
    shutil.copytree(ROOT / "csrc", folder)
    for (file, definition), value in zip(PLACES.items(), (variant.threads, variant.chunk), strict=True):
        text, count = re.subn(definition, rf"\g<1> {value};", (folder / file).read_text())
        if count != 1:
            raise ValueError(f"{file} must have one definition that matches {definition}, got {count}")
        (folder / file).write_text(text)
    return folder


def compiled(variant: Variant, folder: Path, arch: str) -> Path:
    """Return the program of a variant, compiled for an architecture such as ``sm_90``."""
    csrc = sources(variant, folder / f"{variant.threads}-{variant.chunk}")
    program = csrc / "step_variant"
    flags = ["-std=c++20", "-O3", "-fmad=false", f"-arch={arch}", "-w", "-I", str(csrc), "-o", str(program)]
    inputs = [str(ROOT / "benchmarks" / "support" / "step_variant.cu"), str(csrc / "core" / "cuda_runtime.cpp")]
    subprocess.run(["nvcc", *flags, *inputs, "-ldl"], check=True)
    return program


def test_variants(benchmark: Any, keep: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    """Compile all variants at once, and time one after another."""
    major, minor = torch.cuda.get_device_capability()
    variants = [Variant(*each) for each in itertools.product(THREADS, CHUNKS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(lambda variant: compiled(variant, tmp_path, f"sm_{major}{minor}"), variants))
    figures: dict[str, Any] = {}
    print(f"\n\nAdam steps of one tensor on {torch.cuda.get_device_name()}, in ms and share of a copy")
    for variant, program in zip(variants, programs, strict=True):
        command = [str(program), str(scaled(124_000_000, 100_000))]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        copy = found.pop("copy")["GB/s"]
        shares = {name: each | {"of_copy": each["GB/s"] / copy} for name, each in found.items()}
        cells = (f"{name} {each['ms']:.3f} ms {each['of_copy']:.0%}" for name, each in shares.items())
        print(f"  {variant!s:30}{'; '.join(cells)}", flush=True)
        figures[str(variant)] = shares
        keep(figures)
    benchmark.pedantic(lambda: None)

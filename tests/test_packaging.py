"""Installed files, dependencies of the libraries, and messages for unsupported environments."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.pages import tool

ROOT = Path(__file__).parents[1]
check_wheel = tool("check_wheel")


def native(name: str) -> Path:
    """Return the path of the installed library ``name`` ("_C" or "_host")."""
    spec = importlib.util.find_spec("flatout.native._host")
    assert spec is not None
    assert spec.origin is not None
    host = Path(spec.origin)
    return host if name == "_host" else host.with_name(f"{name}.so")


def needed(library: Path) -> set[str]:
    """Return the shared libraries that ``library`` requests from the loader, without versions."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    text = subprocess.run(["readelf", "-dW", library], check=True, capture_output=True, text=True).stdout
    names = re.findall(r"\(NEEDED\).*\[(.+?)\]", text)
    assert names
    return {name.split(".so")[0] for name in names}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_operators_need_nothing_of_torch_but_its_cpu_library() -> None:
    libraries = needed(native("_C"))
    assert "libtorch_cpu" in libraries
    # No library that a CPU-only torch lacks, and none that changes between versions of torch.
    assert not {name for name in libraries if "cuda" in name or "cudart" in name}
    assert not {name for name in libraries if name.startswith(("libtorch", "libc10"))} - {"libtorch_cpu"}


def test_the_host_module_needs_no_torch_at_all() -> None:
    assert not {name for name in needed(native("_host")) if name.startswith(("libtorch", "libc10", "libcuda"))}


def test_a_torch_that_is_too_old_is_refused_by_both_versions() -> None:
    result = run_python("import torch; torch.__version__ = '2.10.1+cu128'; import flatout.native")
    assert result.returncode != 0
    assert result.stderr.strip().splitlines()[-1] == (
        "ImportError: flatout needs torch >= 2.11, found torch 2.10.1+cu128: pip install --upgrade torch"
    )


@pytest.mark.parametrize("built_with_cuda", [False, True])
def test_a_gpu_without_kernels_is_warned_about_once(built_with_cuda: bool) -> None:
    library = importlib.util.find_spec("flatout.native._host")
    assert library is not None
    result = run_python(
        "import sys, types, warnings, torch\n"
        "import importlib.machinery, importlib.util\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.version.cuda = '13.0'\n"
        "spec = importlib.util.find_spec('flatout')\n"
        "package = types.ModuleType('flatout'); package.__path__ = list(spec.submodule_search_locations)\n"
        "host = types.ModuleType('flatout.native._host')\n"
        f"host.built_with_cuda = {built_with_cuda}\n"
        "sys.modules['flatout'] = package\n"
        f"host.__spec__ = importlib.machinery.ModuleSpec('host', None, origin={library.origin!r})\n"
        "sys.modules['flatout.native._host'] = host\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import flatout.native, flatout.native\n"
        "ours = [str(w.message) for w in caught if 'flatout' in str(w.message)]\n"
        "print(len(ours), *ours)"
    )
    assert result.returncode == 0, result.stderr
    if built_with_cuda:
        assert result.stdout.strip() == "0"
    else:
        assert result.stdout.startswith("1 ")
        assert "CUDA 13 toolkit with nvcc" in result.stdout


def test_the_import_loads_no_compiler() -> None:
    slow = "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy", "triton", "IPython", "rich"
    code = "import sys, torch; before = set(sys.modules); import flatout; print(*sorted(set(sys.modules) - before))"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    loaded = result.stdout.split()
    assert "flatout.optimize" in loaded
    assert not set(slow) & set(loaded)


def test_the_metadata_names_every_extra() -> None:
    extras = importlib.metadata.metadata("flatout").get_all("Provides-Extra") or []
    assert {"demo", "test", "bench", "notebook", "monitor"} <= set(extras)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new source archive."""
    for module in ("scikit_build_core", "pybind11"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run(
        [sys.executable, "-c", "import sys, flatout_build; flatout_build.build_sdist(sys.argv[1])", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        check=True,
    )
    (path,) = folder.glob("*.tar.gz")
    return path


def test_the_source_archive_holds_what_a_build_needs(sdist: Path) -> None:
    assert check_wheel.sdist_failures(sdist) == []


@pytest.mark.slow
def test_a_wheel_built_without_nvcc_holds_what_it_should(sdist: Path, tmp_path: Path) -> None:
    # The compiler's optimizations take most of the time, and do not affect the contents and dependencies of a wheel.
    launcher = tmp_path / "unoptimised"
    launcher.write_text('#!/bin/sh\nexec "$@" -O0\n')
    launcher.chmod(0o755)
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--no-index",
            ),
            *("-w", str(tmp_path), "-C", f"build-dir={tmp_path / 'build'}"),
            *("-C", "cmake.define.FLATOUT_CUDA=OFF", "-C", f"cmake.define.CMAKE_CXX_COMPILER_LAUNCHER={launcher}"),
            str(sdist),
        ],
        check=True,
    )
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        assert list(check_wheel.record_failures(wheel)) == []
        for name in names:
            if name.endswith(".so"):
                assert list(check_wheel.library_failures(name, wheel.read(name), archs=[])) == []
        operators = check_wheel.sections(wheel.read("flatout/native/_C.so"))
    assert [name for name in names if not check_wheel.FILES_OF_A_WHEEL.fullmatch(name)] == []
    assert {"flatout/native/_C.so", "flatout/py.typed", "flatout/__init__.py"} <= set(names)
    assert {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/**/*.css")} <= set(names)
    assert sum(name.startswith("flatout/native/_host.") for name in names) == 2  # the module and its type stub
    assert "libtorch_cpu.so" in check_wheel.dynamic_texts(operators, check_wheel.NEEDED)
    cache = (tmp_path / "build/CMakeCache.txt").read_text()
    assert "CMAKE_CUDA_COMPILER" not in cache


def test_the_architectures_of_a_wheel_are_those_of_the_build() -> None:
    text = (ROOT / "cmake/CudaArchitectures.cmake").read_text()
    listed = re.search(r"set\(all_archs (.+)\)", text)
    assert listed is not None
    assert tuple(listed[1].split()) == check_wheel.ALL_ARCHS

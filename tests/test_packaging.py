"""What is installed: its files, what its libraries need, and what is said where it cannot work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def native(name: str) -> Path:
    """The installed library ``name`` ("_C" or "_host")."""
    spec = importlib.util.find_spec("flatout.native._host")
    assert spec is not None
    assert spec.origin is not None
    host = Path(spec.origin)
    return host if name == "_host" else host.with_name(f"{name}.so")


def needed(library: Path) -> set[str]:
    """The shared libraries that ``library`` asks the loader for, without their versions."""
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
    # Neither what a CPU-only torch lacks nor what changes from one torch to the next.
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


def is_expected(path: str) -> bool:
    """Python, its type stubs and marker, templates, the two libraries, the metadata: and nothing else."""
    return bool(
        re.fullmatch(
            r"flatout/([a-z_0-9]+/)*[a-z_0-9]+\.pyi?|flatout/py\.typed|flatout/native/_C\.so"
            r"|flatout/report/templates/[a-z]+\.(html|css)\.j2"
            r"|flatout/native/_host\.[\w.-]+\.so|flatout-[\d.]+\.dist-info/.+",
            path,
        )
    )


def test_the_metadata_names_every_extra() -> None:
    extras = importlib.metadata.metadata("flatout").get_all("Provides-Extra") or []
    assert {"demo", "test", "bench", "notebook", "monitor"} <= set(extras)


@pytest.mark.slow
def test_a_wheel_built_without_nvcc_holds_what_it_should(tmp_path: Path) -> None:
    for module in ("scikit_build_core", "pybind11"):
        pytest.importorskip(module)
    # What is in a wheel, and what its libraries need, does not depend on the optimiser, which takes most of the time.
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
            str(ROOT),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    assert [name for name in names if not is_expected(name)] == []
    assert {"flatout/native/_C.so", "flatout/py.typed", "flatout/__init__.py"} <= set(names)
    assert {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/**/*.j2")} <= set(names)
    assert sum(name.startswith("flatout/native/_host.") for name in names) == 2  # the module and its types
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    assert "libtorch_cpu" in needed(tmp_path / "unpacked/flatout/native/_C.so")
    cache = (tmp_path / "build/CMakeCache.txt").read_text()
    assert "CMAKE_CUDA_COMPILER" not in cache

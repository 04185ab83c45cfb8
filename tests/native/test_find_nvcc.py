"""Choice of nvcc and of architectures at build time, in a file system of fake toolkits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CMAKE = shutil.which("cmake", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
DEFAULT = re.search(r'FLATOUT_CUDA_ARCHS "(.+?)"', (ROOT / "CMakeLists.txt").read_text())[1]  # type: ignore[index]
TOOLKITS = {
    "11.5": (50, 60, 70, 75, 80, 86),
    "12.0": (50, 60, 70, 75, 80, 86, 89, 90),
    "12.1": (50, 60, 70, 75, 80, 86, 89, 90),
    "12.8": (50, 60, 70, 75, 80, 86, 89, 90, 100, 101, 120),
    "13.0": (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121),
}

pytestmark = pytest.mark.skipif(CMAKE is None, reason="needs cmake")


@dataclass(frozen=True)
class Choice:
    """Exit status, nvcc's path below the test's root, chosen architectures, and messages of CMake."""

    status: int
    nvcc: str
    archs: str
    messages: str


class Machine:
    """File system below a folder, with fake toolkits."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def install(self, folder: str, version: str) -> Path:
        nvcc = self.root / folder.lstrip("/") / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        codes = " ".join(f"sm_{arch}" for arch in TOOLKITS.get(version, ()))
        nvcc.write_text(
            "#!/bin/sh\ncase $1 in\n"
            f"  --version) echo 'Cuda compilation tools, release {version}, V{version}.99' ;;\n"
            f"  --list-gpu-code) printf '%s\\n' {codes} ;;\n"
            "esac\n"
        )
        nvcc.chmod(0o755)
        return nvcc

    def choose(self, cuda: str = "AUTO", archs: str = DEFAULT, **variables: str) -> Choice:
        script = self.root / "choose.cmake"
        script.write_text(
            "cmake_minimum_required(VERSION 3.25)\n"
            f'include("{ROOT / "cmake/FindNvcc.cmake"}")\n'
            'message(STATUS "chosen <${FLATOUT_NVCC}> <${FLATOUT_CUDA_ARCHS}>")\n'
        )
        assert CMAKE is not None
        result = subprocess.run(
            [
                *(CMAKE, f"-DFLATOUT_CUDA={cuda}", f"-DFLATOUT_CUDA_ARCHS={archs}", "-Dtorch_root=/site/torch"),
                *(f"-DCMAKE_FIND_ROOT_PATH={self.root}", "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY"),
                *("-P", str(script)),
            ],
            env={"PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
        )
        chosen = re.search(r"chosen <(.*)> <(.*)>", result.stdout)
        nvcc, found = chosen.groups() if chosen else ("", "")
        return Choice(result.returncode, nvcc.removeprefix(str(self.root)), found, result.stdout + result.stderr)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_toolkit_in_usr_local_comes_before_that_of_a_distribution(machine: Machine) -> None:
    for distribution in ("/bin", "/usr/bin"):
        machine.install(distribution, "11.5")
    machine.install("/usr/local/cuda/bin", "13.0")
    assert machine.choose().nvcc == "/usr/local/cuda/bin/nvcc"
    assert machine.choose(CUDA_HOME="", CUDA_PATH="", CUDACXX="").nvcc == "/usr/local/cuda/bin/nvcc"


def test_the_order_of_the_search(machine: Machine) -> None:
    named = machine.install("/opt/named", "12.8")
    places = ["/opt/home/bin", "/opt/path/bin", "/usr/local/cuda/bin", "/site/nvidia/cu13/bin", "/usr/bin"]
    for place in places:
        machine.install(place, "13.0")
    variables = {"CUDA_HOME": "/opt/home", "CUDA_PATH": "/opt/path"}
    assert machine.choose(CUDACXX=str(named), **variables).nvcc == "/opt/named/nvcc"
    for place in places:
        assert machine.choose(**variables).nvcc == f"{place}/nvcc"
        (machine.root / place.lstrip("/") / "nvcc").unlink()
    assert machine.choose(**variables).nvcc == ""


def test_an_nvcc_of_the_path_is_found_by_its_name(machine: Machine) -> None:
    nvcc = machine.install("/opt/bin", "13.0")
    assert machine.choose(CUDACXX="nvcc", PATH=f"{nvcc.parent}:/usr/bin:/bin").nvcc == "nvcc"


@pytest.mark.parametrize(
    ("version", "archs", "kept"),
    [
        ("13.0", DEFAULT, DEFAULT),
        ("12.8", DEFAULT, DEFAULT),
        # The toolkit lacks the architecture with PTX, so PTX moves to the newest remaining one.
        ("12.1", DEFAULT, "75-real;80-real;86-real;89-real;90"),
        ("12.1", "100-real;120-virtual;90-real;80-real", "90;80-real"),
        ("12.1", "80;90-virtual;120", "80;90-virtual"),
        # PTX of 90a does not run on newer GPUs.
        ("12.1", "80-real;90a-real;120", "80;90a-real"),
        ("12.1", "90a-real;120", "90a-real"),
        # No architecture in the list has PTX for newer GPUs.
        ("12.1", "80-real;90-real;100-real", "80-real;90-real"),
        ("12.1", "80-real;90-real;100a;120f-real", "80-real;90-real"),
        ("13.0", "70-real;90a-real", "90a-real"),
        ("12.8", "native", "native"),
        ("12.8", "all-major", "all-major"),
    ],
)
def test_architectures_that_the_toolkit_lacks_are_left_out(
    machine: Machine, version: str, archs: str, kept: str
) -> None:
    machine.install("/usr/local/cuda/bin", version)
    for cuda in ("AUTO", "ON"):
        choice = machine.choose(cuda, archs)
        assert (choice.status, choice.nvcc, choice.archs) == (0, "/usr/local/cuda/bin/nvcc", kept)
        assert "CMake Warning" not in choice.messages


@pytest.mark.parametrize(
    ("version", "archs"),
    [("11.5", DEFAULT), ("12.0", DEFAULT), ("", DEFAULT), ("12.1", "100-real;120"), ("13.0", "70-real")],
    ids=["too old", "a little too old", "without a version", "for older GPUs", "for newer GPUs"],
)
def test_a_toolkit_that_cannot_build_the_kernels(machine: Machine, version: str, archs: str) -> None:
    machine.install("/usr/local/cuda/bin", version)
    choice = machine.choose("AUTO", archs)
    assert (choice.status, choice.nvcc) == (0, "")
    assert "CMake Warning" in choice.messages
    choice = machine.choose("ON", archs)
    assert choice.status != 0
    assert "CMake Error" in choice.messages


def test_no_toolkit(machine: Machine) -> None:
    choice = machine.choose("AUTO")
    assert (choice.status, choice.nvcc) == (0, "")
    assert "CMake Warning" not in choice.messages
    assert machine.choose("ON").status != 0

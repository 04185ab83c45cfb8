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
ALL = "75-real;80;90-real;100-real;120-real"
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
    """Exit status, nvcc's path below the test's root, chosen architectures, and messages of CMake.

    ``own_ptx`` has the architectures that CMake compiles, and ``shared_ptx`` those assembled from PTX of 80.
    """

    status: int
    nvcc: str
    archs: str
    own_ptx: str
    shared_ptx: list[str]
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

    def insert_gpus(self, *capabilities: str, status: int = 0) -> None:
        """Add an nvidia-smi that lists GPUs."""
        nvidia_smi = self.root / "usr/bin/nvidia-smi"
        nvidia_smi.parent.mkdir(parents=True, exist_ok=True)
        lines = " ".join(f"'{capability}'" for capability in capabilities)
        nvidia_smi.write_text(f"#!/bin/sh\nprintf '%s\\n' {lines}\nexit {status}\n")
        nvidia_smi.chmod(0o755)

    def choose(self, cuda: str = "AUTO", archs: str = "AUTO", **variables: str) -> Choice:
        script = self.root / "choose.cmake"
        script.write_text(
            "cmake_minimum_required(VERSION 3.25)\n"
            f'include("{ROOT / "cmake/FindNvcc.cmake"}")\n'
            'message(STATUS "chosen <${FLATOUT_NVCC}> <${FLATOUT_CUDA_ARCHS}> <${FLATOUT_OWN_PTX}> '
            '<${FLATOUT_SHARED_PTX}>")\n'
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
        chosen = re.search(r"chosen <(.*)> <(.*)> <(.*)> <(.*)>", result.stdout)
        nvcc, found, own, options = chosen.groups() if chosen else ("", "", "", "")
        shared = re.findall(r"--generate-code=arch=compute_80,code=\[sm_(\d+)\]", options)
        messages = result.stdout + result.stderr
        return Choice(result.returncode, nvcc.removeprefix(str(self.root)), found, own, shared, messages)


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
        ("13.0", "ALL", ALL),
        ("12.8", "ALL", ALL),
        ("12.1", "ALL", "75-real;80;90-real"),
        # The toolkit lacks the architecture with PTX, so PTX moves to the newest remaining one.
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
    ("version", "archs", "own", "shared"),
    [
        ("13.0", "ALL", "75-real;80", ["90", "100", "120"]),
        ("12.1", "ALL", "75-real;80", ["90"]),
        ("13.0", "90-real", "OFF", ["90"]),
        ("13.0", "75-real", "75-real", []),
        # Code for one model of GPU, PTX of a newer architecture, and names keep a compilation of their own.
        ("13.0", "90a-real;100;121-virtual", "90a-real;100;121-virtual", []),
        ("13.0", "native", "native", []),
    ],
)
def test_gpus_from_80_on_share_one_ptx(machine: Machine, version: str, archs: str, own: str, shared: list[str]) -> None:
    machine.install("/usr/local/cuda/bin", version)
    choice = machine.choose(archs=archs)
    assert (choice.own_ptx, choice.shared_ptx) == (own, shared)


def test_a_build_for_others_has_all_architectures(machine: Machine) -> None:
    machine.install("/usr/local/cuda/bin", "13.0")
    assert machine.choose().archs == ALL
    machine.insert_gpus("9.0")
    assert machine.choose(archs="ALL").archs == ALL


@pytest.mark.parametrize(
    ("version", "gpus", "archs"),
    [
        ("13.0", ["9.0"], "90-real"),
        ("13.0", ["9.0"] * 8, "90-real"),
        ("13.0", ["8.6", "12.0", "8.6"], "86-real;120-real"),
        ("13.0", ["12.1"], "121-real"),
        # The toolkit is older than the GPU, which compiles the PTX of an older architecture.
        ("12.8", ["10.3"], "100"),
        ("12.1", ["12.0"], "90"),
        ("12.1", ["9.0", "12.0"], "90"),
        # The toolkit is newer than a GPU.
        ("13.0", ["7.0", "9.0"], "90-real"),
        # nvidia-smi of an old driver, and one without a GPU.
        ("13.0", ['Field "compute_cap" is not a valid field to query.'], ALL),
        ("13.0", ["No devices were found"], ALL),
        ("13.0", ["[N/A]"], ALL),
    ],
)
def test_a_build_on_a_machine_with_gpus_is_for_them(
    machine: Machine, version: str, gpus: list[str], archs: str
) -> None:
    machine.install("/usr/local/cuda/bin", version)
    machine.insert_gpus(*gpus)
    assert machine.choose().archs == archs


def test_gpus_that_the_toolkit_no_longer_supports(machine: Machine) -> None:
    machine.install("/usr/local/cuda/bin", "13.0")
    machine.insert_gpus("6.1", "7.0")
    choice = machine.choose()
    assert (choice.status, choice.nvcc) == (0, "")
    assert "CMake Warning" in choice.messages
    assert machine.choose("ON").status != 0


@pytest.mark.parametrize(
    ("listed", "archs"),
    [
        ("8.0", "80-real"),
        ("8.0;9.0+PTX", "80-real;90"),
        ("8.0 9.0a 12.0+PTX", "80-real;90a-real;120"),
        ("7.0 8.0", "80-real"),
        ("", "86-real"),
    ],
)
def test_the_variable_of_torch_names_the_architectures(machine: Machine, listed: str, archs: str) -> None:
    machine.install("/usr/local/cuda/bin", "13.0")
    machine.insert_gpus("8.6")
    assert machine.choose(TORCH_CUDA_ARCH_LIST=listed).archs == archs
    assert machine.choose(archs="90-real", TORCH_CUDA_ARCH_LIST=listed).archs == "90-real"


def test_a_variable_of_torch_that_names_no_number(machine: Machine) -> None:
    machine.install("/usr/local/cuda/bin", "13.0")
    choice = machine.choose(TORCH_CUDA_ARCH_LIST="8.0;Hopper")
    assert choice.status != 0
    assert "Hopper" in choice.messages


@pytest.mark.parametrize(
    ("version", "archs"),
    [("11.5", "ALL"), ("12.0", "ALL"), ("", "ALL"), ("12.1", "100-real;120"), ("13.0", "70-real")],
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

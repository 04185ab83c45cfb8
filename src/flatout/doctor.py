"""What on this machine and in this install keeps training from running fast, and how to mend it."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import flatout
from flatout import _native
from flatout.data.machine import available_memory, free_shared_memory, usable_cores
from flatout.mfu.peaks import gpu_of

Verdict = Literal["good", "note", "slow", "broken"]
"""``slow``: it costs speed; ``broken``: something does not work; ``note``: worth knowing."""

_GIB = 2**30
_FILES = 4096
"""Open files below which workers that send tensors by descriptor may run out of them."""
_SHARED = 1 * _GIB
"""/dev/shm below which batches of workers may not fit."""
_GOVERNORS = Path("/sys/devices/system/cpu")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what it belongs to: ``install``, ``GPU``, ``CPU``, ``memory`` or ``settings``.
        name: what was looked at.
        found: what it is, in words.
        verdict: how that is.
        fix: what to do; empty where nothing is to be done.
    """

    topic: str
    name: str
    found: str
    verdict: Verdict = "good"
    fix: str = ""


def examine() -> tuple[Finding, ...]:
    """Look at the machine and the install; changes nothing, and never raises for what it finds."""
    return tuple(finding for check in CHECKS for finding in check())


def as_dicts(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    """Plain values, fit for JSON."""
    return [asdict(finding) for finding in findings]


# -- the install -------------------------------------------------------------------------------------------------


def check_flatout() -> Iterator[Finding]:
    """flatout, and whether it brings its CUDA kernels."""
    found = f"{flatout.__version__}, Python {platform.python_version()}"
    if _native.BUILT_WITH_CUDA:
        yield Finding("install", "flatout", f"{found}, with CUDA kernels")
    elif torch.version.cuda:
        fix = f"set CUDA_HOME to a CUDA {torch.version.cuda} toolkit with nvcc, and install flatout again"
        verdict: Verdict = "slow" if torch.cuda.is_available() else "note"
        yield Finding("install", "flatout", f"{found}, without CUDA kernels", verdict, fix)
    else:
        yield Finding("install", "flatout", f"{found}, for the CPU")


def check_torch() -> Iterator[Finding]:
    """torch, and whether it can use the GPU that there is."""
    version = torch.version.cuda or torch.version.hip
    found = f"{torch.__version__}, " + (f"for CUDA {version}" if version else "for the CPU alone")
    if version or not _DRIVER.exists():
        yield Finding("install", "torch", found)
    else:
        fix = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
        yield Finding("install", "torch", f"{found}, on a machine with an NVIDIA GPU", "broken", fix)


def check_extras() -> Iterator[Finding]:
    """What monitoring needs."""
    missing = [name for name in ("psutil", "pynvml") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("install", "extras", f"without {' and '.join(missing)}", "note", "pip install 'flatout[monitor]'")
    else:
        yield Finding("install", "extras", "psutil, nvidia-ml-py")


# -- the GPUs ----------------------------------------------------------------------------------------------------


def check_gpus() -> Iterator[Finding]:
    """Each GPU, or why there is none."""
    if not torch.cuda.is_available():
        if _DRIVER.exists() and torch.version.cuda:
            yield Finding("GPU", "driver", f"torch cannot use the GPU: {_why_no_cuda()}", "broken", _newer_driver())
        else:
            yield Finding("GPU", "device", "none: training runs on the CPU", "note")
        return
    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)


def _gpu(index: int) -> Iterator[Finding]:
    properties = torch.cuda.get_device_properties(index)
    name = f"cuda:{index}"
    found = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB, sm_{properties.major}{properties.minor}"
    if properties.major < 8:
        yield Finding("GPU", name, found, "note", "no bfloat16 and no TF32 before Ampere: mixed precision is float16")
    else:
        yield Finding("GPU", name, found)
    if _native.BUILT_WITH_CUDA and not _native.has_cuda_kernels(index):
        fix = f"{_newer_driver()}; or build flatout for sm_{properties.major}{properties.minor}"
        yield Finding("GPU", f"{name} kernels", "flatout's kernels cannot run, torch's own serve", "slow", fix)
    if gpu_of(properties.name.partition(" MIG ")[0]) is None:
        fix = "flatout.mfu.measured_peak_flops() tells what it reaches"
        yield Finding("GPU", f"{name} peak", "not in the table: no MFU against a data sheet", "note", fix)


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).strip().partition("\n")[0]
    return "no device is visible (CUDA_VISIBLE_DEVICES?)"


def _newer_driver() -> str:
    return f"install a driver for CUDA {torch.version.cuda} or newer"


def check_cudnn() -> Iterator[Finding]:
    """cuDNN and its flags."""
    cudnn = torch.backends.cudnn
    if not cudnn.is_available():
        if torch.cuda.is_available():
            yield Finding("GPU", "cuDNN", "not available", "slow", "install a build of torch with cuDNN")
        return
    flags = [name for name in ("benchmark", "deterministic") if getattr(cudnn, name)]
    found = _cudnn_version(cudnn.version()) + (f", {' and '.join(flags)} on" if flags else "")
    if not cudnn.enabled:
        yield Finding("GPU", "cuDNN", f"{found}, switched off", "slow", "torch.backends.cudnn.enabled = True")
    elif cudnn.deterministic:
        yield Finding("GPU", "cuDNN", found, "note", "deterministic algorithms may be slower")
    else:
        yield Finding("GPU", "cuDNN", found)


def _cudnn_version(number: int) -> str:
    """92400 is 9.24.0; before cuDNN 9 there was one digit less: 8902 is 8.9.2."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def check_tf32() -> Iterator[Finding]:
    """Whether float32 products may use tensor cores."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8:
        return
    precision = torch.get_float32_matmul_precision()
    if precision == "highest":
        fix = "torch.set_float32_matmul_precision('high'), if 10 bits of mantissa do"
        yield Finding("GPU", "TF32", "off: float32 products run on CUDA cores", "slow", fix)
    else:
        yield Finding("GPU", "TF32", f"on (precision '{precision}')")


# -- the CPU -----------------------------------------------------------------------------------------------------


def check_cores() -> Iterator[Finding]:
    """Cores, the container's share of them, and torch's threads."""
    cores, visible, threads = usable_cores(), os.cpu_count() or 1, torch.get_num_threads()
    found = f"{cores} usable of {visible} logical" if cores != visible else f"{cores}"
    yield Finding("CPU", "cores", f"{found} ({platform.machine()})")
    if threads > cores:
        fix = f"torch.set_num_threads({cores}) or OMP_NUM_THREADS={cores}: more threads than cores wait for each other"
        yield Finding("CPU", "threads", f"{threads}, on {cores} cores", "slow", fix)
    else:
        yield Finding("CPU", "threads", f"{threads}")


def check_load() -> Iterator[Finding]:
    """Whether others keep the cores busy."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load > 0.5 * cores:
        fix = "what flatout measures now is measured beside something else"
        yield Finding("CPU", "load", f"{load:.1f} on {cores} cores", "note", fix)
    else:
        yield Finding("CPU", "load", f"{load:.1f}")


def check_governor() -> Iterator[Finding]:
    """How the clock follows the work."""
    governors = {file.read_text().strip() for file in _GOVERNORS.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    if not governors:
        return  # a virtual machine's host decides
    found = ", ".join(sorted(governors))
    if governors == {"performance"}:
        yield Finding("CPU", "governor", found)
    else:
        fix = "sudo cpupower frequency-set -g performance"
        yield Finding("CPU", "governor", found, "slow" if "powersave" in governors else "note", fix)


# -- memory and limits -------------------------------------------------------------------------------------------


def check_memory() -> Iterator[Finding]:
    """Memory that is left, a container's limit included."""
    left = available_memory()
    found = f"{left / _GIB:.1f} GiB available"
    if left < 2 * _GIB:
        yield Finding("memory", "RAM", found, "slow", "less than a few workers need: end other programs")
    else:
        yield Finding("memory", "RAM", found)


def check_shared_memory() -> Iterator[Finding]:
    """/dev/shm, through which workers send batches."""
    free = free_shared_memory()
    if free == float("inf"):
        return
    found = f"{free / _GIB:.2f} GiB free"
    if free < _SHARED:
        yield Finding("memory", "/dev/shm", found, "slow", "docker run --shm-size=8g, or --ipc=host: workers send here")
    else:
        yield Finding("memory", "/dev/shm", found)


def check_files() -> Iterator[Finding]:
    """How many files this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        fix = f"ulimit -n {most}: every tensor that a worker sends holds a descriptor"
        yield Finding("memory", "open files", f"{soft:,}, at most {most}", "note", fix)
    else:
        yield Finding("memory", "open files", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")


# -- settings that slow everything -------------------------------------------------------------------------------

_SLOW_VARIABLES = {
    # variable: (values that slow, what they do)
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel launch waits for the kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor is a cudaMalloc and a cudaFree"),
    "NVIDIA_TF32_OVERRIDE": (("0",), "TF32 is forbidden, whatever torch says"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked on all ranks"),
    "TORCHDYNAMO_DISABLE": (("1",), "torch.compile compiles nothing"),
    "TORCH_COMPILE_DISABLE": (("1",), "torch.compile compiles nothing"),
    "PYTHONDEVMODE": (("1",), "Python checks every allocation"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs talk through host memory"),
}


def check_environment() -> Iterator[Finding]:
    """Variables for debugging that were left on."""
    for variable, (values, effect) in _SLOW_VARIABLES.items():
        if os.environ.get(variable) in values:
            found = f"{variable}={os.environ[variable]}"
            yield Finding("settings", "environment", f"{found}: {effect}", "slow", f"unset {variable}")


def check_anomaly_mode() -> Iterator[Finding]:
    """Autograd's checks."""
    if torch.is_anomaly_enabled():
        fix = "torch.autograd.set_detect_anomaly(False)"
        yield Finding("settings", "anomaly detection", "on: every backward node is checked for NaN", "slow", fix)


def check_tools() -> Iterator[Finding]:
    """NVIDIA's profilers, where there is a GPU to look into."""
    if torch.cuda.is_available():
        found = [tool for tool in ("nsys", "ncu") if shutil.which(tool)]
        yield Finding("install", "profilers", ", ".join(found) or "neither nsys nor ncu", "good" if found else "note")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_flatout,
    check_torch,
    check_extras,
    check_tools,
    check_gpus,
    check_cudnn,
    check_tf32,
    check_cores,
    check_load,
    check_governor,
    check_memory,
    check_shared_memory,
    check_files,
    check_environment,
    check_anomaly_mode,
)
"""What is looked at, in the order of the page."""

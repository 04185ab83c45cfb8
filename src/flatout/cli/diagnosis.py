"""What on this machine and in this install keeps training from running fast, and how to mend it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import flatout
from flatout import native
from flatout.core import machine
from flatout.core.machine import available_memory, free_shared_memory, total_memory, usable_cores
from flatout.mfu.peaks import gpu_of
from flatout.monitor.nvml import throttle_words

Verdict = Literal["good", "note", "slow", "broken"]
"""``slow``: it costs speed; ``broken``: something does not work; ``note``: worth knowing."""

_GIB = 2**30
_FILES = 4096
"""Open files below which workers that send tensors by descriptor may run out of them."""
_SWAPPED = _GIB // 4
_SHARED = 1 * _GIB
"""/dev/shm below which batches of workers may not fit."""
_GOVERNORS = Path("/sys/devices/system/cpu")
_DRIVER = Path("/proc/driver/nvidia/version")
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check())
        except Exception as error:  # a machine odder than any that was thought of
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(Finding("other", name, f"could not be looked at: {_line(error)}", "note"))
    return tuple(findings)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def as_dicts(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    """Plain values, fit for JSON."""
    return [asdict(finding) for finding in findings]


# -- the install -------------------------------------------------------------------------------------------------


def check_flatout() -> Iterator[Finding]:
    """flatout, and whether it brings its CUDA kernels."""
    found = f"{flatout.__version__}, Python {platform.python_version()}"
    if native.BUILT_WITH_CUDA:
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


def check_compiler() -> Iterator[Finding]:
    """What ``torch.compile`` builds its kernels with."""
    compiler = next(filter(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    triton = importlib.util.find_spec("triton") is not None
    lacks = {
        "no C++ compiler": (compiler is None, "install one: sudo apt install g++"),
        "no Python.h": (not header.exists(), "install Python's headers: sudo apt install python3-dev"),
        "no Triton": (torch.cuda.is_available() and not triton, "pip install triton"),
    }
    for lack, (missing, fix) in lacks.items():
        if missing:
            yield Finding("install", "torch.compile", f"{lack}: it cannot build kernels", "slow", fix)
    if not any(missing for missing, _ in lacks.values()):
        yield Finding("install", "torch.compile", f"{compiler}{', Triton' if triton else ''}")


# -- the GPUs ----------------------------------------------------------------------------------------------------


def check_gpus() -> Iterator[Finding]:
    """Each GPU, or why there is none."""
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if _DRIVER.exists() and torch.version.cuda and hidden is not None and hidden.strip() in ("", "-1"):
            found = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}: training runs on the CPU"
            yield Finding("GPU", "device", found, "note", "unset CUDA_VISIBLE_DEVICES")
        elif _DRIVER.exists() and torch.version.cuda:
            yield Finding("GPU", "driver", f"torch cannot use the GPU: {_why_no_cuda()}", "broken", _newer_driver())
        else:
            yield Finding("GPU", "device", "none: training runs on the CPU", "note")
        return
    if version := re.search(r" (\d{3}\.[\d.]+) ", machine.text_of(_DRIVER)):
        yield Finding("GPU", "driver", version[1])
    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)


def _gpu(index: int) -> Iterator[Finding]:
    name = f"cuda:{index}"
    try:
        properties = torch.cuda.get_device_properties(index)
    except Exception as error:
        fix = "nvidia-smi -q tells how the GPU is; another program may hold it, or it needs a reset"
        yield Finding("GPU", name, f"cannot be used: {_line(error)}", "broken", fix)
        return
    found = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB, sm_{properties.major}{properties.minor}"
    if properties.major < 8:
        yield Finding("GPU", name, found, "note", "no bfloat16 and no TF32 before Ampere: mixed precision is float16")
    else:
        yield Finding("GPU", name, found)
    if not _has_kernels(torch.cuda.get_arch_list(), properties.major, properties.minor):
        found = f"torch {torch.__version__} is built for {', '.join(torch.cuda.get_arch_list())}"
        fix = f"install a torch whose build has sm_{properties.major}{properties.minor}"
        yield Finding("GPU", f"{name} torch", found, "broken", fix)
    if native.BUILT_WITH_CUDA and not native.has_cuda_kernels(index):
        fix = f"{_newer_driver()}; or build flatout for sm_{properties.major}{properties.minor}"
        yield Finding("GPU", f"{name} kernels", "flatout's kernels cannot run, torch's own serve", "slow", fix)
    if gpu_of(properties.name.partition(" MIG ")[0]) is None:
        fix = "flatout.mfu.measured_peak_flops() tells what it reaches"
        yield Finding("GPU", f"{name} peak", "not in the table: no MFU against a data sheet", "note", fix)
    yield from _board(name, f"GPU-{getattr(properties, 'uuid', '')}")


def _has_kernels(built_for: list[str], major: int, minor: int) -> bool:
    """Whether code for these architectures runs: on later minors of its major, or anywhere later where it is PTX."""
    for architecture in built_for:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", architecture):
            kind, (first, second) = found[1], (int(found[2]), int(found[3]))
            if (first, second) <= (major, minor) and (kind == "compute" or first == major):
                return True
    return not built_for


def _board(name: str, uuid: str) -> Iterator[Finding]:
    """What the driver tells of a GPU beside CUDA; nothing without nvidia-ml-py, of a MIG device, or where it fails."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return
    try:
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:
            return
        for look in (_link, _persistence, _memory_errors, _clocks):
            try:
                yield from look(nvml, gpu, name)
            except Exception:  # this GPU or this driver does not tell
                continue
    finally:
        nvml.nvmlShutdown()


def _link(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    now, most = nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
    if now < most:  # the generation is no fault: it falls when the GPU is idle
        fix = "copies to the GPU are slower: seat the card in a full slot, or ask who runs the machine"
        yield Finding("GPU", f"{name} PCIe", f"{now} lanes of {most}", "slow", fix)


def _persistence(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    if not nvml.nvmlDeviceGetPersistenceMode(gpu):
        found = "persistence mode is off: the driver loads anew for every program"
        yield Finding("GPU", f"{name} start", found, "note", "sudo nvidia-smi -pm 1")


def _memory_errors(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    if count := nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, since):
        found = f"{count} error{'s' if count > 1 else ''} that ECC could not correct"
        yield Finding("GPU", f"{name} memory", found, "broken", "reset the GPU: sudo nvidia-smi --gpu-reset, or reboot")


def _clocks(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    words = set(throttle_words(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)))
    if held := sorted(words - {"idle", "power limit", "sync boost"}):  # at work all GPUs meet their power limit
        fix = "cool the machine, or nvidia-smi -rgc; flatout monitor shows it live"
        yield Finding("GPU", f"{name} clocks", f"held down by: {', '.join(held)}", "slow", fix)


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return _line(error)
    return "no device is visible (CUDA_VISIBLE_DEVICES?)"


def _newer_driver() -> str:
    return f"install a driver for CUDA {torch.version.cuda} or newer"


def check_cudnn() -> Iterator[Finding]:
    """cuDNN and its flags."""
    cudnn = torch.backends.cudnn
    try:
        version = cudnn.version()
    except RuntimeError as error:  # the library that was found is another than torch was built with
        fix = "unset LD_LIBRARY_PATH, or take another cuDNN out of it: torch brings its own"
        yield Finding("GPU", "cuDNN", _line(error), "broken", fix)
        return
    if version is None or not cudnn.is_available():
        if torch.cuda.is_available():
            yield Finding("GPU", "cuDNN", "not available", "slow", "install a build of torch with cuDNN")
        return
    flags = [name for name in ("benchmark", "deterministic") if getattr(cudnn, name)]
    found = _cudnn_version(version) + (f", {' and '.join(flags)} on" if flags else "")
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
    # Every older flag sets this one too; they raise, or answer with what was, where this was set by itself.
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        fix = "torch.set_float32_matmul_precision('high'), if 10 bits of mantissa do"
        yield Finding("GPU", "TF32", "off: float32 products run on CUDA cores", "slow", fix)
    else:
        yield Finding("GPU", "TF32", "on")


# -- the CPU -----------------------------------------------------------------------------------------------------


def check_cores() -> Iterator[Finding]:
    """Cores, the container's share of them, and torch's threads."""
    cores, visible, threads = usable_cores(), os.cpu_count() or 1, torch.get_num_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else visible
    quota = min(map(machine.quota_of, machine.control_groups("cpu")), default=float("inf"))
    limits = [f"affinity {allowed}"] if allowed < visible else []
    limits += [f"quota {quota:g}"] if quota < allowed else []
    found = f"{cores} usable of {visible} logical" if cores != visible else f"{cores}"
    yield Finding("CPU", "cores", f"{found} ({', '.join([*limits, platform.machine()])})")
    if threads > cores:
        fix = f"torch.set_num_threads({cores}) or OMP_NUM_THREADS={cores}: more threads than cores wait for each other"
        yield Finding("CPU", "threads", f"{threads}, on {cores} cores", "slow", fix)
    elif threads < cores and "OMP_NUM_THREADS" in os.environ:
        found = f"{threads}, on {cores} cores: OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
        fix = "unset OMP_NUM_THREADS, where this is the machine's only training (torchrun sets it to 1)"
        yield Finding("CPU", "threads", found, "note", fix)
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
        drivers = {machine.text_of(file) for file in _GOVERNORS.glob("cpu[0-9]*/cpufreq/scaling_driver")}
        stuck = "powersave" in governors and not drivers & {"intel_pstate", "amd-pstate-epp"}  # these follow the work
        yield Finding("CPU", "governor", found, "slow" if stuck else "note", fix)


def check_numa() -> Iterator[Finding]:
    """Whether memory may lie at another socket than the core that reads it."""
    nodes = sum(1 for _ in _NODES.glob("node[0-9]*"))
    if nodes > 1:
        fix = "numactl --cpunodebind=N --membind=N, with N of the GPU: nvidia-smi topo -m"
        yield Finding("CPU", "NUMA", f"{nodes} nodes", "note", fix)


# -- memory and limits -------------------------------------------------------------------------------------------


def check_memory() -> Iterator[Finding]:
    """Memory that is left, a container's limit included."""
    left = available_memory()
    found = f"{left / _GIB:.1f} of {total_memory() / _GIB:.1f} GiB available"
    if left < 2 * _GIB:
        yield Finding("memory", "RAM", found, "slow", "less than a few workers need: end other programs")
    else:
        yield Finding("memory", "RAM", found)


def check_swap() -> Iterator[Finding]:
    """Whether memory was moved to disk."""
    used, total = machine.swap()
    if used > _SWAPPED:
        found = f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB in use"
        yield Finding("memory", "swap", found, "note", "memory was short: fewer workers, or end other programs")


def check_huge_pages() -> Iterator[Finding]:
    """Whether large arrays may lie in large pages."""
    if "[never]" in machine.text_of(_HUGE_PAGES):
        fix = f"echo madvise | sudo tee {_HUGE_PAGES}"
        yield Finding("memory", "huge pages", "transparent huge pages are off", "note", fix)


def check_shared_memory() -> Iterator[Finding]:
    """/dev/shm, through which workers send batches."""
    free = free_shared_memory()
    if free == float("inf"):
        return
    found = f"{free / _GIB:.2f} GiB free"
    if free < _SHARED:
        fix = "workers send here: docker run --shm-size=8g; else sudo mount -o remount,size=8g /dev/shm"
        yield Finding("memory", "/dev/shm", found, "slow", fix)
    else:
        yield Finding("memory", "/dev/shm", found)


def check_files() -> Iterator[Finding]:
    """How many files this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        fix = f"ulimit -n {most}: every tensor that a worker sends holds a descriptor"
        yield Finding("memory", "open files", f"{soft:,}, at most {most}", "note", fix)
    else:
        yield Finding("memory", "open files", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")


# -- settings that slow everything -------------------------------------------------------------------------------

_SLOW_VARIABLES = {
    # variable: (values that slow, any if there is none; what they do)
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel launch waits for the kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ((), "every tensor is a cudaMalloc and a cudaFree"),
    "NVIDIA_TF32_OVERRIDE": (("0",), "TF32 is forbidden, whatever torch says"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked on all ranks"),
    "TORCHDYNAMO_DISABLE": (("1",), "torch.compile compiles nothing"),
    "TORCH_COMPILE_DISABLE": (("1",), "torch.compile compiles nothing"),
    "TORCH_COMPILE_DEBUG": (("1",), "torch.compile writes down all that it does"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (("1",), "torch.compile builds every kernel anew"),
    "PYTHONDEVMODE": ((), "Python checks every allocation"),
    "PYTHONTRACEMALLOC": ((), "Python notes where every allocation comes from"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs talk through host memory"),
}


def check_environment() -> Iterator[Finding]:
    """Variables for debugging that were left on."""
    for variable, (values, effect) in _SLOW_VARIABLES.items():
        value = os.environ.get(variable)
        if value and (value in values or not values):
            found = f"{variable}={value}"
            yield Finding("settings", "environment", f"{found}: {effect}", "slow", f"unset {variable}")


def check_allocator() -> Iterator[Finding]:
    """Settings of the caching allocator, which no other line tells."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if value := os.environ.get(variable):
            yield Finding("settings", "allocator", f"{variable}={value}")


def check_tracing() -> Iterator[Finding]:
    """A debugger or a coverage tool."""
    if sys.gettrace() is not None:
        found = "on: a debugger or a coverage tool looks at every line of Python"
        yield Finding("settings", "tracing", found, "slow", "time the training without it")


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
    check_compiler,
    check_tools,
    check_gpus,
    check_cudnn,
    check_tf32,
    check_cores,
    check_load,
    check_governor,
    check_numa,
    check_memory,
    check_swap,
    check_huge_pages,
    check_shared_memory,
    check_files,
    check_environment,
    check_allocator,
    check_tracing,
    check_anomaly_mode,
)
"""What is looked at, in the order of the page."""
